"""What an installed kvcompress contains."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kvcompress", "methods", "tasks", "conf")
INSTALLED = {"kvcompress": "kvcompress", **{name: f"kvcompress/{name}" for name in FOLDERS[1:]}}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> list[str]:
    """Names of the files in a wheel of this tree, built without a network."""
    if int(metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("building a wheel needs setuptools>=77 (it is in the dev extra)")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    for yaml in ("probe.yaml", "method/probe.yaml"):
        (tree / "conf" / yaml).parent.mkdir(exist_ok=True)
        (tree / "conf" / yaml).write_text("a: 1\n")
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True, timeout=240)
    return zipfile.ZipFile(next(out.glob("*.whl"))).namelist()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_wheel_contains_every_module_under_its_import_path(wheel, folder):
    expected = {
        f"{INSTALLED[folder]}/{path.relative_to(ROOT / folder).as_posix()}" for path in (ROOT / folder).rglob("*.py")
    }
    assert expected and expected <= set(wheel)


def test_a_wheel_contains_config_files_and_the_type_marker(wheel):
    assert {"kvcompress/conf/probe.yaml", "kvcompress/conf/method/probe.yaml", "kvcompress/py.typed"} <= set(wheel)
    own = {f"kvcompress/conf/{path.relative_to(ROOT / 'conf').as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert own <= set(wheel)


def test_a_wheel_contains_the_data_of_calibrations(wheel):
    own = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("kvcompress/calibrate/data/**/*") if path.is_file()}
    assert own and own <= set(wheel)


def test_a_wheel_contains_the_page_of_results_and_its_licences(wheel):
    folder = ROOT / "kvcompress" / "report" / "page"
    own = {path.relative_to(ROOT).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert len(own) >= 13 and own <= set(wheel)


def test_a_wheel_installs_nothing_beside_kvcompress(wheel):
    assert {name.split("/")[0].split("-")[0] for name in wheel} <= {"kvcompress", "hydra_plugins"}


def test_constraints_name_exact_versions_of_every_dependency():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 and "+" not in line for line in lines), "a local build (+cpu) fits nobody else"
    pinned = {line.split("==")[0] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {name.split(";")[0].split(">")[0].split("<")[0].split("=")[0].split("[")[0].strip() for name in asked}
    assert names <= pinned
