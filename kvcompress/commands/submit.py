"""Command line of submissions: checks a folder of records and writes the one file that a pull request adds to the board.

kvcompress submit results/study                    checks it and writes results/board/study.board.json
kvcompress submit --check results/board/*.json     checks such files, as make test does
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcompress.commands.program import program

BOARD = Path("results/board")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check a submission.

    Returns:
        0, 1 where something is wrong (each in one line: file, field, what differs), 2 where nothing was given.
    """
    parser = argparse.ArgumentParser(
        prog=program("submit"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path, help="folder of a sweep, or of several")
    parser.add_argument("--check", nargs="+", type=Path, metavar="FILE", help="check files instead, or all of a folder")
    parser.add_argument("--name", help="of the submission and its file; default: the folder's")
    parser.add_argument("--by", default="", help="whose it is: a name, a paper")
    parser.add_argument("--board", type=Path, default=BOARD, help=f"folder of the board's files; default: {BOARD}")
    parser.add_argument("--out", type=Path, help="file to write; default: NAME.board.json in --board")
    parser.add_argument("--own-setting", action="store_true", help="protocols of its own, apart from the board's")
    parser.add_argument("--other-sources", action="store_true", help="take runs of another version of the sources too")
    parser.add_argument("--published", type=Path, metavar="CSV", help="published numbers to add, marked as such")
    parser.add_argument(
        "--foreign", type=Path, nargs="+", default=[], metavar="FOLDER", help="results of other programs"
    )
    options = parser.parse_args(arguments)
    if options.check:
        return check(options.check, options.board)
    if options.results is None:
        parser.print_usage(sys.stderr)
        print(f"{program('submit')}: give a folder of results, or --check FILE", file=sys.stderr)
        return 2
    return write(options)


def check(paths: Sequence[Path], board: Path) -> int:
    """Check files against themselves, the tasks of these sources, and the other files of their board."""
    from kvcompress.report import board_file, board_runs

    asked = [file for path in paths for file in board_file.files(path) or ([path] if not path.is_dir() else [])]
    if not asked:
        print("no board file here")
        return 0
    versions, wrong = board_runs.task_versions(), 0
    beside = sorted({file.resolve() for file in (*asked, *board_file.files(board))})
    read: dict[Path, board_file.BoardFile] = {}
    for file in beside:
        try:
            read[file] = board_file.read(file)
        except ValueError as error:
            if file in {one.resolve() for one in asked}:
                print(error)
                wrong += 1
    for file in asked:
        mine = read.get(file.resolve())
        if mine is None:
            continue
        found = list(board_file.problems(mine, str(file), versions))
        if not found:
            # of two files that do not agree the later one, by name, is the one that is told
            others = {path.name: other for path, other in read.items() if path < file.resolve()}
            found = list(board_file.protocol_problems(mine, str(file), others))
        for problem in found:
            print(problem)
        wrong += len(found)
        if not found:
            print(
                f"{file}: {len(mine.runs)} runs in {len(mine.protocols)} protocols, {len(mine.foreign)} rows of others: fine"
            )
    return int(wrong > 0)


def write(options: argparse.Namespace) -> int:
    """Check a folder of records and write its file."""
    from kvcompress.common.atomic_files import write_whole
    from kvcompress.common.text import for_filename
    from kvcompress.report import board_file
    from kvcompress.report.board_runs import collect, task_versions
    from kvcompress.report.frame import others as numbers_of_others

    name = for_filename(options.name or options.results.resolve().name)
    collected = collect(options.results, options.other_sources)
    skipped: list[str] = []
    foreign = numbers_of_others(options.published, options.foreign, skipped)
    found = [*collected.problems, *(f"{text}" for text in skipped)]
    made = board_file.BoardFile(name, collected.protocols, collected.runs, [_plain(row) for row in foreign], options.by)
    for protocol in made.protocols.values() if options.own_setting else ():
        protocol["own_setting"] = True
    out = options.out or options.board / f"{name}{board_file.SUFFIX}"
    if not found:
        found += map(str, board_file.problems(made, str(options.results), task_versions()))
    if not found:
        others = {}
        for file in board_file.files(options.board):
            if file.resolve() != out.resolve():
                try:
                    others[file.name] = board_file.read(file)
                except ValueError as error:
                    found.append(str(error))
        found += map(str, board_file.protocol_problems(made, str(options.results), others))
    for text in found:
        print(text)
    if found:
        print(
            f"nothing is written: {len(found)} {'thing is' if len(found) == 1 else 'things are'} wrong", file=sys.stderr
        )
        return 1
    for note in collected.notes:
        print(note, file=sys.stderr)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, made.text())
    print(f"wrote {out}: {len(made.runs)} runs in {len(made.protocols)} protocols, {len(made.foreign)} rows of others")
    return 0


def _plain(row: dict[str, object]) -> dict[str, object]:
    """A row of others without what is empty."""
    return {key: value for key, value in row.items() if value not in (None, [], False)}
