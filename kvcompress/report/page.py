"""The HTML board: one page that opens from disk, with table and figures; samples lie beside it.

The page holds all that its table and figures show, styles and scripts included, and asks no network for anything. Samples,
which are many, lie beside it in a folder of the same name and are loaded when somebody looks at them.

Apache ECharts draws the figures; its minified release is kept compressed in `page/vendor`, with its licence.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kvcompress.report import samples
from kvcompress.report.command import Commands
from kvcompress.report.page_data import build
from kvcompress.report.run_index import Loaded
from kvcompress.report.samples import plain

CHARTS = "vendor/echarts-6.1.0.min.js.gz"
# in the order in which they run: the table stands before the charts' library is read
SCRIPTS = ("core.js", "table.js", "viewer.js", "main.js", CHARTS, "plots.js", "charts.js", "start.js")


@dataclass(frozen=True)
class Written:
    """What was written: the page, the folder of samples beside it, and how many samples that holds."""

    page: Path
    folder: Path
    samples: int


def asset(name: str) -> str:
    """The text of a file of the page; `.gz` is unpacked."""
    data = resources.files("kvcompress.report").joinpath("page", *name.split("/")).read_bytes()
    return (gzip.decompress(data) if name.endswith(".gz") else data).decode("utf-8")


def write_page(
    found: Loaded,
    path: Path,
    foreign: Sequence[dict[str, Any]] = (),
    commands: Commands | None = None,
    title: str | None = None,
) -> Written:
    """Write the page of these records to `path`, and their samples into a folder beside it.

    Args:
        foreign: rows of other origins, shown greyed.
        commands: how the command of a run is found; by default every setting is written out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent / f"{path.stem}_samples"
    writer = samples.Writer(folder)
    data = build(found, foreign, path, commands or Commands(), writer.add)
    writer.close()
    data["files"] = folder.name
    data["title"] = title or ", ".join(sorted({entry.sweep for entry in found.entries})) or "no records"
    for group in data["groups"]:
        group["prompts"] = samples.prompts_file(group["sweep"], group["pair"])
    path.write_text(render(data), encoding="utf-8", errors="replace")
    return Written(path, folder, writer.count)


def render(data: dict[str, Any]) -> str:
    """The page as text. Scripts are named by their hashes in its policy: no other script runs, nothing is fetched."""
    shapes = data.pop("shapes")
    scripts = [asset(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    # 'self' is the samples of a page that a server gives, file: those of one opened from disk
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src 'self' file: {hashes}; "
        "base-uri 'none'; form-action 'none'"
    )
    blocks = [f'<script type="application/json" id="data">{plain(data)}</script>']
    blocks += [f'<script type="application/json" id="shapes-{n}">{plain(one)}</script>' for n, one in enumerate(shapes)]
    parts = {
        "policy": html.escape(policy),
        "title": html.escape(data["title"]),
        "style": asset("board.css"),
        "data": "\n".join(blocks),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    page = asset("board.html")
    for name, text in parts.items():
        before, mark, after = page.partition(f"{{{{{name}}}}}")
        assert mark, f"board.html has no place for {name}"
        page = before + text + after
    return page
