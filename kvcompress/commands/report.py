"""Command line of reports: leaderboard, figures and page from records alone. What draws is imported when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcompress.commands.program import program


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the leaderboard of every sweep under the given paths; write the files asked for.

    Returns:
        0, or 1 where no record was found.
    """
    parser = argparse.ArgumentParser(
        prog=program("report"), description="Leaderboard, heat maps and curves from records."
    )
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("results")], help="folders with records")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as markdown; - prints them")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every key of every record; - prints it")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write figures into this folder, as PNG and SVG")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the page that opens from disk, samples beside it"
    )
    parser.add_argument(
        "--all", type=Path, metavar="FOLDER", help="board.html, board.md, board.csv and figures in one folder"
    )
    parser.add_argument(
        "--submission",
        type=Path,
        metavar="FOLDER",
        help="write answers to ZeroSCROLLS and LongMemEval as their judges take them",
    )
    parser.add_argument(
        "--published", type=Path, metavar="FILE", help="csv of published numbers, shown apart and in grey"
    )
    parser.add_argument(
        "--foreign", type=Path, nargs="+", default=[], metavar="FOLDER", help="results of other programs, likewise"
    )
    parser.add_argument("--quiet", action="store_true", help="print no tables, write the files alone")
    options = parser.parse_args(arguments)
    if options.all is not None:
        options.html = options.html or options.all / "board.html"
        options.markdown = options.markdown or options.all / "board.md"
        options.csv = options.csv or options.all / "board.csv"
        options.png = options.png or options.all / "figures"

    return report(options)


def report(options: argparse.Namespace) -> int:
    """What `main` does, with its arguments parsed."""
    from kvcompress.common.text import PlainConsole
    from kvcompress.report import submission
    from kvcompress.report.command import from_hydra
    from kvcompress.report.curves import draw_curves
    from kvcompress.report.decode import draw_speed
    from kvcompress.report.external_tables import external_markdown, print_external, relevant
    from kvcompress.report.figure import figure_stem
    from kvcompress.report.frame import as_foreign, others
    from kvcompress.report.heatmap import draw_heatmap
    from kvcompress.report.iso_bytes import draw_equal
    from kvcompress.report.page import write_page
    from kvcompress.report.pareto import draw_fronts
    from kvcompress.report.reuse import draw_reuse, print_reuse, reuse_markdown
    from kvcompress.report.rollouts import draw_rollouts
    from kvcompress.report.rollouts import markdown as rollouts_markdown
    from kvcompress.report.run_index import Entry, gather
    from kvcompress.report.seeds import print_seeds, seeds_markdown
    from kvcompress.report.serving import draw_serving, of_entries
    from kvcompress.report.serving import markdown as serving_markdown
    from kvcompress.report.table import leaderboard, leaderboard_markdown, print_legend, terminal, title, to_csv

    notes = PlainConsole(stderr=True)
    found = gather(options.paths)
    foreign = as_foreign(found.foreign) + others(options.published, options.foreign, found.damaged)
    beside = relevant(foreign, [entry.record for entry in found.entries])
    for damaged in found.damaged:
        notes.print(f"skipped {damaged}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    if len(beside) < len(foreign):
        notes.print(
            f"{len(foreign) - len(beside):,} of {len(foreign):,} numbers of others are of no model and task measured here",
            style="dim", highlight=False,
        )  # fmt: skip
    if not found.entries and not beside:
        places = ", ".join(map(str, options.paths))
        notes.print(f"no records under {places}: make some with kvcompress run", style="red", markup=False)
        return 1
    groups = found.groups()
    printed = False
    records = [record for group in groups for record in group]
    if foreign:
        records = [record | {"origin": "measured"} for record in records] + foreign
    page = leaderboard_markdown(groups) + ("\n" if groups and beside else "") + external_markdown(beside)
    reused = reuse_markdown(entry.record for entry in found.entries)
    page += f"\n{reused}" if reused else ""
    repeated = seeds_markdown(found.entries)
    page += f"\n{repeated}" if repeated else ""
    gaps = rollouts_markdown(found.entries)
    page += f"\n{gaps}" if gaps else ""
    page += "".join(f"\n{serving_markdown(rows)}" for rows in of_entries(found.entries).values())
    for target, text in ((options.markdown, page), (options.csv, to_csv(records))):
        if target is None:
            continue
        if str(target) == "-":
            sys.stdout.write(text)
            printed = True
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            notes.print(f"wrote {target}", markup=False, soft_wrap=True)
    if not printed and not options.quiet:
        for sweep in sorted({entry.sweep for entry in found.entries}):
            notes.print(f"sweep {sweep}", style="bold", markup=False, highlight=False)
            leaderboard(
                [entry.record for entry in found.entries if entry.sweep == sweep], terminal(), with_legend=False
            )
        print_seeds(found.entries, terminal())
        print_reuse((entry.record for entry in found.entries), terminal())
        print_external(beside, terminal())
        if found.entries:
            print_legend((entry.record for entry in found.entries), terminal())
    if options.png is not None:
        pairs: dict[tuple[str, str], list[Entry]] = {}
        for entry in found.entries:
            pairs.setdefault((entry.sweep, str(entry.record.get("protocol.pair"))), []).append(entry)
        for (sweep, pair), entries in sorted(pairs.items()):
            path = options.png / f"{figure_stem(sweep, '', entries[0].record['task'], pair, '')}.png"
            if draw_heatmap(entries, f"{sweep}: {title(entries[0].record)}", path):
                notes.print(f"wrote {path}", markup=False, soft_wrap=True)
            path = path.with_name(f"{path.stem}-speed.png")
            if draw_speed(entries, f"{sweep}: {title(entries[0].record)}", path):
                notes.print(f"wrote {path}", markup=False, soft_wrap=True)
        figures = draw_curves(found.entries, options.png, beside) + draw_fronts(found.entries, options.png)
        figures += draw_equal(found.entries, options.png) + draw_reuse(found.entries, options.png)
        figures += draw_rollouts(found.entries, options.png) + draw_serving(found.entries, options.png)
        for path in figures:
            notes.print(f"wrote {path}", markup=False, soft_wrap=True)
    if options.submission is not None:
        files = submission.write(found.entries, options.submission)
        for path, note in files:
            notes.print(f"wrote {path}: {note}", markup=False, soft_wrap=True)
        if not files:
            notes.print("no run of zero_scrolls or longmemeval here: nothing to submit", style="yellow")
    if options.html is not None:
        written = write_page(found, options.html, foreign, from_hydra())
        notes.print(
            f"wrote {written.page.resolve()}: open it in a browser ({written.samples:,} samples beside it)",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return 0
