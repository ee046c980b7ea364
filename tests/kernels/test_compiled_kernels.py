"""Triton's kernels compile for real GPUs through their wrappers, fit them, spill nothing, and need no more than said."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from kvcompress.bench.compiled_kernels import CASES, SHARED_MEMORY, compiled
from kvcompress.kernels import triton_decode, triton_groups
from kvcompress.kernels.launch import SPARE, tile
from kvcompress.kernels.triton_mass import Tiles

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


ALL = [
    pytest.param(target, dtype, dims, list(CASES), marks=pytest.mark.long)
    for target in (80, 90, 100)
    for dtype, dims in (("bfloat16", "64,128,256"), ("float16", "128"), ("float32", "64,128"))
]


@pytest.mark.parametrize(("target", "dtype", "dims", "cases"), [(90, "bfloat16", "64", ["lanes of 16"]), *ALL])
def test_every_kernel_that_is_taken_fits_and_spills_nothing(target, dtype, dims, cases, tmp_path):
    """In a process without Triton's interpreter. Codes and mass are taken in half precision only."""
    file = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "kvcompress.bench.compiled_kernels", "--targets", str(target), "--dims", dims]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--dtypes", dtype, "--cases", ";".join(cases), "--json", str(file)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(file.read_text())
    assert {row["case"] for row in rows} == {name for name in cases if dtype in CASES[name].dtypes}
    for row in rows:
        taken = row["bound"] is None or row["bound"] <= SHARED_MEMORY[target]
        assert row["bound"] is None or row["shared"] <= row["bound"], row
        assert not taken or (row["shared"] <= SHARED_MEMORY[target] and row["stack"] == 0), row


@pytest.mark.parametrize(
    ("found", "bound"),
    [  # bytes that Triton 3.9 asked for when it compiled these, bfloat16 but for the third
        (39_428, triton_decode.shared_bytes(16, 64, 128, 128, 2)),
        (76_292, triton_decode.shared_bytes(16, 64, 256, 256, 2)),
        (41_476, triton_decode.shared_bytes(16, 64, 64, 64, 4)),
        (475_908, triton_decode.shared_bytes(128, 64, tile(576), 512, 2)),  # latents of 128 query heads: no card has it
        (88_064, triton_groups.shared_bytes(16, 128, 128, 4, 2)),
        (120_832, triton_groups.shared_bytes(16, 128, 128, 8, 2)),
        (174_080, triton_groups.shared_bytes(16, 256, 256, 4, 2)),
        (115_200, Tiles(64, 128, 128, 3).shared_bytes(2)),
    ],
)
def test_what_a_wrapper_takes_a_kernel_to_need_is_enough_and_not_much_more(found, bound):
    assert found <= bound + SPARE and bound <= 1.1 * found


def test_the_interpreter_is_no_compiler(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="compile in a process without it"):
        next(compiled([90], [64], ["bfloat16"], list(CASES)))
