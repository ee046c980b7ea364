"""What an installed kvcompress contains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kvcompress", "methods", "tasks", "conf")
INSTALLED = {"kvcompress": "kvcompress", **{name: f"kvcompress/{name}" for name in FOLDERS[1:]}}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A wheel of this tree, built without a network."""
    if int(metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("building a wheel needs setuptools>=77 (it is in the dev extra)")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for yaml in ("probe.yaml", "method/probe.yaml"):
        (tree / "conf" / yaml).parent.mkdir(exist_ok=True)
        (tree / "conf" / yaml).write_text("a: 1\n")
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True, timeout=240)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(built) -> list[str]:
    """Names of the files in it."""
    return zipfile.ZipFile(built).namelist()


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


def test_a_wheel_contains_data_of_methods_tasks_and_benchmarks(wheel):
    for folder in ("methods", "tasks"):
        own = {
            f"{INSTALLED[folder]}/{path.relative_to(ROOT / folder).as_posix()}"
            for path in ROOT.glob(f"{folder}/data/**/*")
            if path.is_file()
        }
        assert own <= set(wheel)
    assert {"kvcompress/bench/outside/kvpress_worker.py", "kvcompress/measure/tiers.yaml"} <= set(wheel)


def test_a_wheel_says_whose_it_is_and_has_its_licences_and_its_command(built, wheel):
    (info,) = {name.split("/")[0] for name in wheel if ".dist-info/" in name}
    with zipfile.ZipFile(built) as file:
        said = file.read(f"{info}/METADATA").decode()
        entry = file.read(f"{info}/entry_points.txt").decode()
    assert "kvcompress = kvcompress.commands.door:main" in entry
    assert "License-Expression: Apache-2.0 AND BSD-3-Clause" in said and "Author: The kvcompress authors" in said
    assert "Classifier: Typing :: Typed" in said and "Provides-Extra: gemma" in said
    licences = {name.removeprefix(f"{info}/licenses/") for name in wheel if f"{info}/licenses/" in name}
    page = "kvcompress/report/page/vendor"
    assert licences == {"LICENSE", f"{page}/LICENSE-d3", f"{page}/LICENSE-echarts", f"{page}/NOTICE-echarts"}


@pytest.mark.long
def test_an_installed_wheel_runs_a_sweep_and_makes_its_board_from_an_empty_folder(built, tmp_path):
    """In an environment that has this one's dependencies and nothing of the clone; methods, tasks and settings are its own."""
    environment, work = tmp_path / "environment", tmp_path / "work"
    venv.create(environment, with_pip=False, symlinks=True)
    work.mkdir()
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built) as file:
        file.extractall(site)
    script = environment / "bin" / "kvcompress"  # as an installer writes it
    script.write_text(f"#!{python}\nimport sys\nfrom kvcompress.commands.door import main\nsys.exit(main())\n")
    script.chmod(0o755)
    # packages of this environment, behind the wheel's own; its .pth files, which lead to the clone, are not read
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVCOMPRESS"))}
    clean |= {"KVCOMPRESS_CACHE": str(tmp_path / "cache"), "COLUMNS": "200"}

    def run(*command: object) -> str:
        done = subprocess.run(list(map(str, command)), cwd=work, env=clean, text=True, capture_output=True, timeout=280)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    where = "import kvcompress, kvcompress.conf as c, kvcompress.methods as m, kvcompress.tasks as t; "
    places = run(python, "-c", f"{where}print(*(one.__file__ for one in (kvcompress, c, m, t)))").split()
    assert len(places) == 4 and all(path.startswith(str(site)) for path in places)
    assert "installed" in run(script, "doctor")
    small = ["model=random/llama", "task=needle", "task.lengths=[450]", "limit=2", "task.max_new_tokens=4"]
    run(script, "run", "-m", *small, "method=full,snapkv", "budget=0.5")
    assert "2 ok" in run(python, "-m", "kvcompress", "status", "default")
    run(script, "report", "--all", "board")
    assert {"board.html", "board.md", "board.csv", "figures"} <= {path.name for path in (work / "board").iterdir()}
    assert sorted(path.name for path in work.iterdir()) == ["board", "results"]


def test_constraints_name_exact_versions_of_every_dependency():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 and "+" not in line for line in lines), "a local build (+cpu) fits nobody else"
    pinned = {line.split("==")[0] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {name.split(";")[0].split(">")[0].split("<")[0].split("=")[0].split("[")[0].strip() for name in asked}
    assert names <= pinned
