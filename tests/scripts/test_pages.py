"""README and docs: their links lead somewhere, their commands exist, and the site has every page."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from helpers import load_script

from kvcompress.commands.door import COMMANDS
from kvcompress.sweep import schema_index
from kvcompress.sweep.config import (
    LoggerConfig,
    ModelConfig,
    PathsConfig,
    RunConfig,
    SweepConfig,
    check_overrides,
    expand_suites,
    folder,
    register,
)

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")), *DOCS]
PAGES += sorted((ROOT / "results" / "reference").rglob("*.md"))
VERBS = set(COMMANDS)
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
OLD = {"LOG.md", "CHANGELOG.md"}  # tell what was, under the names of their day
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MADE_UP = re.compile(r"[A-Z]{3,}|<|…")  # NAME, FILE, OTHER: for the reader to fill in


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> set[str]:
    """Ids of a page's headings as forges and the site make them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", title)
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading_that_exist(page):
    text = FENCE.sub("", text_of(page))
    text = re.sub(r"`[^`\n]*`", "", text)
    broken = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def commands(page: Path) -> list[str]:
    """Lines of a page's code blocks, and what it quotes in a line, that begin with a program of this repository."""
    text = text_of(page)
    found = [line for _, block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    found += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return [
        line.strip() for line in found if re.match(r"\s*((kvcompress|make)\s+\S|python (scripts/|-m kvcompress))", line)
    ]


def refusal(command: str) -> str | None:
    """Why a command cannot be: no such program, target, verb, flag or setting; None where all exist."""
    words = shlex.split(command, comments=True)
    words = words[: next((i for i, word in enumerate(words) if word in ("|", "&&", ";", ">")), len(words))]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((f"no target {w}" for w in words[1:] if "=" not in w and w not in targets), None)
    if words[0] == "kvcompress":
        verb, rest = (words[1] if len(words) > 1 else ""), words[2:]
        if verb not in VERBS:
            return f"no verb {verb}"
    elif words[1] == "-m":
        verb, rest = words[2], words[3:]
        if find_spec(verb) is None:
            return f"no module {verb}"
    else:
        verb, rest = Path(words[1]).stem, words[2:]
        if not (ROOT / words[1]).is_file():
            return f"no script {words[1]}"
    if verb == "run":
        return wrong_override(rest)
    return next(
        (
            f"no flag {word}"
            for word in rest
            if word.startswith("--") and f'"{word.partition("=")[0]}"' not in sources()
        ),
        None,
    )


def wrong_override(words: list[str]) -> str | None:
    words = [
        word for word, before in zip(words, ["", *words], strict=False) if before != "--cfg"
    ]  # whose value is no setting
    overrides = [word for word in words if not word.startswith("-") and not MADE_UP.search(word.partition("=")[2])]
    overrides = [
        word for word in overrides if not re.match(r"(status|dry)=|(task|method)=\S*(mymethod|longkeys|lastbox)", word)
    ]
    made_there = any("lastbox" in word or "longkeys" in word for word in words)  # by the page, with settings of its own
    for word in overrides:
        key = word.partition("=")[0].lstrip("+~")
        if not key.startswith("hydra") and key not in known_keys() and not made_there:
            return f"no key {key}"
    register()
    try:
        check_overrides(expand_suites(overrides, folder()), folder())
    except ValueError as error:
        return str(error)
    return None


@cache
def known_keys() -> set[str]:
    """Keys and groups of a command line, and settings of every choice of a group."""
    found = {item.name for item in fields(RunConfig)} | {"experiment", "debug", "tasks", "status"}
    for group, schemas in schema_index.load().groups.items():
        found |= {f"{group}.{name}" for schema in schemas.values() for name, *_ in schema.settings}
    for group, cls in (
        ("model", ModelConfig),
        ("sweep", SweepConfig),
        ("logger", LoggerConfig),
        ("paths", PathsConfig),
    ):
        found |= {f"{group}.{item.name}" for item in fields(cls)}
    return found


@cache
def sources() -> str:
    """Texts of all commands, in which a flag stands in quotes."""
    files = [*(ROOT / "scripts").glob("*.py"), *(ROOT / "kvcompress").rglob("*.py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in files) + '"--help"'


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OLD], ids=named)
def test_every_command_of_a_page_exists_with_its_settings(page):
    wrong = {
        command: why
        for command in commands(page)
        if not MADE_UP.search(command.split()[-1]) and (why := refusal(command))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("make dem", "no target dem"),
        ("kvcompress runn", "no verb runn"),
        ("python scripts/reprot.py results", "no script scripts/reprot.py"),
        ("python -m kvcompress.tires", "no module kvcompress.tires"),
        ("kvcompress report results --htm x", "no flag --htm"),
        ("kvcompress run method=snapkv bugdet=0.5", "bugdet"),
        ("python scripts/run.py task=neddle", "neddle"),
    ],
)
def test_a_command_that_is_mistyped_is_found(command, why):
    assert why in str(refusal(command))


def test_the_readme_is_short_and_shows_its_two_commands_first():
    text = text_of(ROOT / "README.md")
    assert len(text.split()) <= 1200
    assert "make demo" in text and "make test" in text and text.index("## Install") < text.index("## From Python")


def test_the_site_lists_every_page_and_every_notebook_once():
    listed = re.findall(r"[\w/.-]+\.(?:md|ipynb)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    own = [name for name in listed if not name.startswith("repository/") and "*" not in name]
    assert sorted(own) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in [*DOCS, *NOTEBOOKS])
    known = load_script("site_pages").outside()
    assert {name.removeprefix("repository/") for name in listed if name.startswith("repository/")} <= set(known)


def test_links_out_of_docs_lead_to_the_site_s_copy():
    rewritten = load_script("site_pages").rewritten
    known = {"ARCHITECTURE.md", "results/reference/README.md"}
    text = "[a](../ARCHITECTURE.md) [b](faq.md#x) [c](https://d) [d](../nowhere.md)"
    made = rewritten(text, "contributing.md", known)
    assert made == "[a](repository/ARCHITECTURE.md) [b](faq.md#x) [c](https://d) [d](../nowhere.md)"
    assert rewritten("[log](docs/LOG.md)", "repository/ARCHITECTURE.md", known) == "[log](../LOG.md)"
    assert (
        rewritten("![f](a.png)", "repository/results/reference/README.md", known | {"results/reference/a.png"})
        == "![f](a.png)"
    )


def test_the_citation_has_what_the_format_asks_for():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited) and all(
        "name" in one for one in cited["authors"]
    )
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert cited["version"] == version


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=named)
def test_a_notebook_runs_from_its_first_cell_to_its_last(notebook, tmp_path):
    client = pytest.importorskip("nbclient", reason="needs the extra docs")
    nbformat = pytest.importorskip("nbformat")
    made = nbformat.read(notebook, as_version=4)
    client.NotebookClient(made, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.get("execution_count") for cell in made.cells if cell.cell_type == "code")


@pytest.mark.long
@pytest.mark.model
def test_the_page_of_python_examples_runs_as_it_is_written(tmp_path):
    blocks = [block for language, block in FENCE.findall(text_of(ROOT / "docs" / "python.md")) if language == "python"]
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "7342" in done.stdout, done.stderr


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
