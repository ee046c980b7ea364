"""Command line that says what is installed, which device and kernels would run, and what is missing, with one command each."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

import kvcompress
from kvcompress.commands.fetch import there
from kvcompress.commands.program import program
from kvcompress.common.cache_folder import cache_dir
from kvcompress.common.text import PlainConsole
from kvcompress.models.packaged_models import EMBEDDED

EXTRAS = {  # those that users ask for, and what they are for
    "gpu": "kernels on a GPU",
    "metrics": "scores of LongBench and ZeroSCROLLS",
    "code": "SCBench's repository sets",
    "ruler": "the words of RULER's published keys",
    "reasoning": "task=reasoning/…",
    "eval": "task=lm_eval",
    "launchers": "hydra.launcher.engine=joblib, ray or submitit",
    "wandb": "logger=wandb",
    "trackio": "logger=trackio",
}
COMPILERS = ("g++", "clang++", "c++")
MOST_NAMED = 8  # models of the Hub's cache


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what is there, whether that is enough, and the command that mends it."""

    section: str
    name: str
    found: str
    fine: bool = True
    needed: bool = False  # nothing runs without it
    fix: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found; returns 1 where something is missing without which nothing runs, else 0."""
    parser = argparse.ArgumentParser(prog=program("doctor"), description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, to paste into a report")
    options = parser.parse_args(arguments)
    findings = list(examine())
    if options.json:
        print(json.dumps([asdict(one) for one in findings], indent=1))
    else:
        show(findings)
    return int(any(one.needed and not one.fine for one in findings))


def show(findings: Sequence[Finding]) -> None:
    """Findings by section, then what is missing with its command."""
    console = PlainConsole()
    width = max(len(one.name) for one in findings)
    for section in dict.fromkeys(one.section for one in findings):
        console.print(section, style="bold")
        for one in findings:
            if one.section == section:
                console.print(f"  {'✓' if one.fine else '✗' if one.needed else '–'} {one.name:{width}}  {one.found}")
    lacks = [one for one in findings if one.fix]
    console.print("missing" if lacks else "nothing is missing", style="bold")
    for one in lacks:
        console.print(f"  {one.name}: {one.fix}")


def examine() -> Iterator[Finding]:
    """Look at everything, in the order in which it is shown."""
    yield from packages()
    yield from extras()
    yield from devices()
    yield from models()
    yield from folders()


def packages() -> Iterator[Finding]:
    """The program itself, and what it cannot do without."""
    place = Path(kvcompress.__file__).resolve().parent
    how = "a clone" if (place.parent / "pyproject.toml").is_file() else "installed"
    yield Finding("packages", "kvcompress", f"{metadata.version('kvcompress')}, {how}: {place}")
    yield Finding("packages", "python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    for asked in requirements():
        have = version(asked.name)
        fine = have is not None and asked.specifier.contains(have, prereleases=True)
        found = have or "not installed"
        wanted = "" if fine else f", wanted: {asked.specifier}" * bool(str(asked.specifier))
        fix = None if fine else f"pip install {str(asked)!r}"
        yield Finding("packages", asked.name, found + wanted, fine, needed=True, fix=fix)


def extras() -> Iterator[Finding]:
    """Extras of the package: complete, or what is not there."""
    known = metadata.metadata("kvcompress").get_all("Provides-Extra") or []
    for name, use in EXTRAS.items():
        if name not in known:
            continue
        absent = [asked.name for asked in requirements(name) if version(asked.name) is None]
        found = use if not absent else f"{use}; not installed: {', '.join(absent)}"
        yield Finding("extras", name, found, not absent, fix=f"pip install 'kvcompress[{name}]'" if absent else None)


def requirements(extra: str = "") -> list[Requirement]:
    """What the installed package asks for on this machine: for itself, or for an extra alone."""
    found = [Requirement(line) for line in metadata.requires("kvcompress") or ()]
    return [
        one
        for one in found
        if (one.marker is None and not extra)
        or (
            one.marker is not None
            and one.marker.evaluate({"extra": extra})
            and not (extra and one.marker.evaluate({"extra": ""}))
        )
    ]


def version(package: str) -> str | None:
    """Version of an installed package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def devices() -> Iterator[Finding]:
    """Processor, accelerator, the kernels that would run, and the compiler that `decode=compiled` needs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        import torch
    except Exception as error:  # whatever a broken installation raises
        yield Finding("device", "torch", f"cannot be imported: {error}", False, needed=True, fix="pip install torch")
        return
    yield Finding("device", "cpu", f"{cores} cores, {torch.get_num_threads()} threads of torch {torch.__version__}")
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    smi = shutil.which("nvidia-smi") is not None
    if cuda:
        named = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
        kind = "ROCm" if torch.version.hip else f"CUDA {torch.version.cuda}"
        yield Finding("device", "gpu", f"{', '.join(named)} ({kind}): device=auto takes the first")
    elif mps:
        yield Finding("device", "gpu", "Apple's (mps): device=auto takes it")
    else:
        fix = "install the torch of your CUDA version: https://pytorch.org/get-started/locally" if smi else None
        why = "nvidia-smi is here, but this torch sees no CUDA device" if smi else "none: everything runs on the CPU"
        yield Finding("device", "gpu", why, not smi, fix=fix)
    triton = find_spec("triton") is not None
    if cuda:
        fix = None if triton else "pip install 'kvcompress[gpu]'"
        found = f"Triton {version('triton')}" if triton else "torch's own: Triton is not installed"
        yield Finding("device", "kernels", found, triton, fix=fix)
    else:
        yield Finding("device", "kernels", "torch's own (Triton's run on a GPU)")
    compiler = next(
        (path for name in (os.environ.get("CXX"), *COMPILERS) if name and (path := shutil.which(name))), None
    )
    none = "none: decode=compiled is refused, and decode=auto steps as decode=static does"
    fix = None if compiler else compiler_command()
    yield Finding("device", "compiler", compiler or none, compiler is not None, fix=fix)


def compiler_command() -> str:
    """The command that installs a C++ compiler here."""
    known = {"apt-get": "sudo apt-get install g++", "dnf": "sudo dnf install gcc-c++", "apk": "sudo apk add g++"}
    known |= {"pacman": "sudo pacman -S gcc"}
    if sys.platform == "darwin":
        return "xcode-select --install"
    return next((command for tool, command in known.items() if shutil.which(tool)), "conda install cxx-compiler")


def models() -> Iterator[Finding]:
    """Embedded models, and those of the Hub that lie in its cache."""
    for name, embedded in EMBEDDED.items():
        here = there(name)
        found = f"{embedded.package} {version(embedded.package)}" if here else f"{embedded.package} is not installed"
        # one embedded model is enough: the other is not missed
        fix = f"kvcompress fetch {name}" if not here and name == next(iter(EMBEDDED)) else None
        yield Finding("models", name, found, here, fix=fix)
    hub = hub_cache()
    names = sorted(path.name.removeprefix("models--").replace("--", "/") for path in hub.glob("models--*"))
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    offline = " (offline: HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else ""
    listed = f"{', '.join(names[:MOST_NAMED])}{more}" if names else "none yet; model=owner/name fetches one"
    yield Finding("models", "hub cache", f"{hub}: {listed}{offline}")
    yield Finding("models", "random", "model=random/llama and others: random weights, always there")


def hub_cache() -> Path:
    """Where huggingface_hub keeps models."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Path("~/.cache/huggingface/hub").expanduser()
    return Path(HF_HUB_CACHE)


def folders() -> Iterator[Finding]:
    """Data sets, results and cache."""
    data = Path(os.environ.get("KVCOMPRESS_DATA") or "data").expanduser()
    if data.is_dir():
        yield Finding("folders", "data", f"{data.resolve()}: {len(list(data.iterdir()))} entries")
    else:
        asked = "KVCOMPRESS_DATA" if os.environ.get("KVCOMPRESS_DATA") else "paths.data"
        none = f"{data}: not there; built-in tasks need none, others fetch from the Hub ({asked})"
        yield Finding(
            "folders", "data", none, False, fix="export KVCOMPRESS_DATA=FOLDER, where data sets lie on this machine"
        )
    for name, path, fix in (
        ("results", Path("results").absolute(), "cd to a folder of yours, or paths.results=FOLDER"),
        ("cache", cache_dir(), "export KVCOMPRESS_CACHE=FOLDER"),
    ):
        wrong = not_writable(path)
        yield Finding(
            "folders", name, wrong or str(path), wrong is None, needed=name == "cache", fix=fix if wrong else None
        )


def not_writable(path: Path) -> str | None:
    """Why nothing can be written to a folder, or to the nearest one above it that is there; None where it can."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return f"cannot write: {error}"
