"""Tests run on one thread: the models are tiny."""

import pytest
import torch

from kvcompress import load

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run tests marked long")


def pytest_collection_modifyitems(config, items):
    """Tests marked long are left out unless asked for."""
    if config.getoption("--long"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def smollm2():
    """The embedded model and its tokenizer; tests of it are skipped where its package is absent."""
    try:
        return load("smollm2")
    except OSError as error:
        pytest.skip(str(error))
