"""Matplotlib set-up: titles, axes, file names, and saving as PNG and SVG."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

from kvcompress.common.text import for_figure, for_filename

KINDS = ("png", "svg")


def plotting() -> Any:
    """pyplot, set up to draw into files; loaded only where something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvcompress"
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG beside each other and close it; the same records give the same files."""
    plt = plotting()
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in KINDS]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return paths


def figure_stem(sweep: str, model: str, task: str, pair: Any, kind: str) -> str:
    """The name of a figure without its ending, from what it is of and what it shows; what is empty is left out."""
    parts = [sweep, model.replace("/", "_"), task.replace("/", "-"), "" if pair is None else str(pair)[:8], kind]
    return "-".join(for_filename(part) for part in parts if part)


def wrapped(text: str, inches: float, size: float) -> str:
    """`text` with line breaks between words, so that no line is wider than so many inches at a font size."""
    return "\n".join(wrap(text, max(20, int(inches * 72 / (0.6 * size))), break_long_words=False))


def suptitle(figure: Any, text: str, size: float = 11, **place: Any) -> None:
    """A title above all panels, in as many lines as the figure's width needs; at the left unless placed."""
    place = place or {"x": 0.01, "ha": "left"}
    figure.suptitle(wrapped(for_figure(text), 0.97 * figure.get_figwidth(), size), fontsize=size, **place)


def light_axes(axes: Any, size: float, grid: str = "both") -> None:
    """Faint lines behind what is drawn, small numbers, and no frame above and at the right."""
    axes.tick_params(labelsize=size)
    axes.grid(axis=grid, color="#eeeeee", lw=0.6, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
