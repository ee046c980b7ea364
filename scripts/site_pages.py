"""mkdocs hook: files outside docs/ that pages link to become pages of the site, with links that lead there.

On disk and on a forge a page links to `../results/reference/README.md`; the site has only what lies in docs/. So each file of
`OUTSIDE` is added under `repository/`, and links of all pages are written anew where their target moved.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = ("ARCHITECTURE.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "results/reference/**/*")
MOVED = "repository"
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s]+)(?=\))")


def outside() -> list[str]:
    """Paths, from the root, of what the site shows of the rest of the repository."""
    found = {path for pattern in OUTSIDE for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def site_path(path: str, known: set[str]) -> str | None:
    """Where a file of the repository lies in the site; None where it does not."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{MOVED}/{path}" if path in known else None


def rewritten(markdown: str, page: str, known: set[str]) -> str:
    """`markdown` with links as the site has them.

    Args:
        page: path of the page in the site.
        known: paths from the root of files that were added to it.
    """
    source = page.removeprefix(f"{MOVED}/") if page.startswith(f"{MOVED}/") else f"docs/{page}"

    def target(found: re.Match[str]) -> str:
        path, mark, anchor = found[1].partition("#")
        place = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)), known)
        # what the site lacks stays as it is, so that a strict build tells of it
        return found[1] if place is None else posixpath.relpath(place, posixpath.dirname(page) or ".") + mark + anchor

    return LINK.sub(target, markdown)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path in outside():
        files.append(File.generated(config, f"{MOVED}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return rewritten(markdown, page.file.src_uri, set(outside()))
