"""Tests run on one thread: the models are tiny."""

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
