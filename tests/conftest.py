"""Tests run on one thread: the models are tiny. Without a GPU, Triton kernels run under Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():  # read when Triton is first imported, which transformers does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kvcompress import load  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """The embedded model and its tokenizer; tests of it are skipped where its package is absent."""
    try:
        return load("smollm2")
    except OSError as error:
        pytest.skip(str(error))
