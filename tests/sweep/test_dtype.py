"""`dtype=auto`, the default: float32 on a CPU under the run ids of before, the checkpoint's own type elsewhere."""

from __future__ import annotations

import json

import pytest
import torch
from composed import composed

from kvcompress.bench.emulated_cuda import EmulatedCUDA
from kvcompress.models.loading import dtype_of
from kvcompress.sweep.cell_spec import CellSpec

COMMON = ("model=random", "task=needle", "task.lengths=[512]", "method=snapkv", "budget=0.5")


def spec(*overrides):
    return CellSpec.from_config(composed(*COMMON, *overrides))


def test_on_a_cpu_a_cell_without_a_dtype_is_that_of_float32():
    default, named = spec("device=cpu"), spec("device=cpu", "dtype=float32")
    assert default.run_id == named.run_id and default.model_key == named.model_key
    assert default.config.dtype == default.identity["dtype"] == "float32"
    assert spec("device=cpu", "dtype=bfloat16").run_id != default.run_id


@pytest.mark.skipif(torch.cuda.is_available(), reason="emulated where there is no GPU")
def test_on_a_gpu_the_run_id_and_the_stored_configuration_hold_what_it_came_to(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    with EmulatedCUDA():
        found = spec(f"model.name={tmp_path}", "device=auto")
        assert found.identity["dtype"] == found.config.dtype == "bfloat16" and found.identity["device"] == "cuda"
        assert found.run_id == spec(f"model.name={tmp_path}", "device=cuda", "dtype=bfloat16").run_id


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_a_checkpoints_type_is_what_its_configuration_says(tmp_path, written, expected):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **written}))
    assert dtype_of(str(tmp_path), "auto", "cuda") == expected
    assert dtype_of(str(tmp_path), "auto", "cpu") == torch.float32
    assert dtype_of(str(tmp_path), "float16", "cuda") == torch.float16


def test_models_without_a_checkpoint_have_a_type_too():
    assert dtype_of("random/llama", "auto", "cuda") == dtype_of("smollm2", "auto", "cuda") == torch.float32
    assert dtype_of("random/llama3-8b", "auto", "cuda") == torch.bfloat16


def test_an_unknown_type_is_refused_with_auto_among_the_valid_ones():
    with pytest.raises(ValueError, match="int3.*valid: auto, float32"):
        dtype_of("smollm2", "int3", "cpu")
