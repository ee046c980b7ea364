"""The page on serving: methods compared on public traces from a file of measured costs, as tables, csv and figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcompress.measure.serving import board, hits, traces
from kvcompress.measure.serving.costs import MethodCosts, modelled
from kvcompress.measure.serving.requests import Request, first, scaled
from kvcompress.measure.serving.simulation import Server
from kvcompress.report import serving as report
from kvcompress.report import tiers as tier_figures

Row = dict[str, Any]


def read_costs(path: Path) -> tuple[dict[str, MethodCosts], Mapping[str, Any]]:
    """Costs by name, and the machine that they were measured on.

    Raises:
        ValueError: no such file, or the full cache is not in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        told = [{key: value for key, value in one.items() if key != "points"} for one in content["costs"]]
        found = {one["name"]: MethodCosts.of(one) for one in told}
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no file of `kvcompress bench serving-costs` ({error})") from error
    if "full" not in found:
        raise ValueError(f"{path} has no costs of the full cache to compare with; it has {', '.join(found)}")
    return found, content.get("hardware", {})


def serve(
    name: str,
    requests: Sequence[Request],
    sides: Mapping[str, MethodCosts],
    slots: Sequence[int],
    settings: Mapping[str, Any],
    slack: float = 25.0,
    halvings: int = 4,
    host: float = 4.0,
) -> Iterator[list[Row]]:
    """Rows of each memory, the smallest first."""
    full = sides["full"]
    targets = board.Targets.of(full, requests, slack)
    for count in sorted(slots):
        memory = board.memory_of(full, requests, count)
        server = Server(memory=memory, host=host * memory, **settings)
        compared = board.compare(requests, sides, "full", server, targets, halvings)
        for side, one in compared.items():
            one["curve"] = board.curve(requests, sides[side], full.token_bytes, memory, server.policy)
        said = {"memory": memory, "targets": {"ttft": targets.ttft, "tbt": targets.tbt}, "sides": compared}
        yield report.rows_of(name, f"{count} slots", said, {side: one.as_dict() for side, one in sides.items()})


def requests_of(name: str, data: Path | None, count: int | None, length_scale: float | None) -> list[Request]:
    return scaled(first(traces.read(traces.find(name, data)), count), length_scale)


def unlimited(names: Sequence[str], data: Path | None) -> dict[str, tuple[float, float]]:
    """Hit shares of an unlimited cache on whole traces, for any prefix and for whole prompts."""
    found = {}
    for name in names:
        requests = first(traces.read(traces.find(name, data)), None)
        found[name] = (hits.replay(requests, None).rate, hits.replay(requests, None, reuse="whole").rate)
    return found


def write(
    rows: Sequence[Row], sides: Mapping[str, MethodCosts], machine: Mapping[str, Any], stem: Path, title: str, note: str
) -> list[Path]:
    """`stem`.md, `stem`.csv and figures beside them."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    where = f"{machine.get('cpu', '?')}, {machine.get('threads', '?')} threads" if machine else "?"
    lines = [f"# {title}", "", note, "", f"Costs measured on: {where}.", "", report.markdown(rows), "## Fits", ""]
    lines += [
        "| method | c0, ms | c1, µs | c2, ns | c3, µs | compress, µs/token | s0, ms | s1, ms | s2, µs | R² prompt | R² step |"
    ]
    lines += ["|" + " :--- |" + " ---: |" * 10]
    for one in sides.values():
        c0, c1, c2, c3 = one.prefill
        s0, s1, s2 = one.step
        cells = [
            one.name,
            f"{1e3 * c0:.1f}",
            f"{1e6 * c1:.1f}",
            f"{1e9 * c2:.2f}",
            f"{1e6 * c3:.1f}",
            f"{1e6 * one.compress[1]:.1f}",
        ]
        cells += [f"{1e3 * s0:.2f}", f"{1e3 * s1:.3f}", f"{1e6 * s2:.3f}"]
        cells += [f"{one.r2.get(key, float('nan')):.3f}" for key in ("prefill", "step")]
        lines.append("| " + " | ".join(cells) + " |")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    stem.with_suffix(".csv").write_text(report.to_csv(rows), encoding="utf-8")
    return [stem.with_suffix(".md"), stem.with_suffix(".csv"), *report.draw(rows, stem, note)]


def tiers(sides: Mapping[str, MethodCosts], folder: Path) -> list[Path]:
    """Figures of the tier model."""
    links = ("pcie4-x16", "pcie5-x16", "nvlink-c2c", "cxl2-x16", "nvme-pcie5", "rdma-400g")
    ratios = {name: one.ratio for name, one in sides.items() if one.reuse == "prefix" and one.ratio <= 1.02}
    found = tier_figures.draw_pages(links, folder / "tiers-pages")
    return found + tier_figures.draw_thresholds(ratios, "h100-sxm", "llama3-70b", links, folder / "tiers-thresholds")


def on(device: str, model: str, sides: Mapping[str, MethodCosts]) -> dict[str, MethodCosts]:
    """The same methods modelled on another device and model."""
    return {name: modelled(one, device, model) for name, one in sides.items()}
