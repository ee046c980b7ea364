"""Tests run on one thread: the models are tiny."""

import os
from pathlib import Path

import pytest
import torch

from kvcompress import load

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """The embedded model and its tokenizer; tests of it are skipped where its package is absent."""
    try:
        return load("smollm2")
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of published data sets (`paths.data`); tests of it are skipped where it is absent."""
    folder = Path(os.environ.get("KVCOMPRESS_DATA", "data"))
    if not (folder / "longbench_v1").is_dir():
        pytest.skip(f"no data sets in {folder}: set KVCOMPRESS_DATA to their folder")
    return folder
