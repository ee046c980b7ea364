"""Tests run on one thread: the models are tiny. Without a GPU, Triton kernels run under Triton's interpreter.

What is heavy is imported where tests run: the process that hands them out to others (`-n 2`) needs none of it.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run tests marked long")


def hands_out(config) -> bool:
    """True in the process that only hands tests out."""
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


def pytest_configure(config):
    """Before test modules are imported."""
    if hands_out(config):
        return
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():  # read when Triton is first imported, which transformers does
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import helpers

    helpers.LONG = config.getoption("--long")


def pytest_collection_modifyitems(config, items):
    """Tests marked long are left out unless asked for."""
    if config.getoption("--long"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def settle():
    """Take what is there out of the collector's sight: sweeps collect garbage, a third of a second over all of torch."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session):
    if not hands_out(session.config):
        settle()


def pytest_sessionfinish(session):
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Models that tests share are as they were made after every test, and have no stores that it filled."""
    import small_models

    from kvcompress.reuse import kv_store

    result = yield
    kv_store._stores.clear()
    if nextitem is not None and nextitem.path != item.path:
        settle()
    if altered := small_models.altered():
        pytest.fail(f"{item.nodeid} altered a shared model: use small_model(..., fresh=True)\n" + "\n".join(altered))
    return result


@pytest.fixture(scope="session")
def smollm2():
    """The embedded model and its tokenizer; tests of it are skipped where its package is absent."""
    from kvcompress import load

    try:
        return load("smollm2")
    except OSError as error:
        pytest.skip(str(error))


def drawn_filters(model):
    """Some direction per layer and KV head of a model, always the same."""
    import torch

    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return torch.randn(config.num_hidden_layers, heads, dim, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="session", autouse=True)
def measured_elsewhere(tmp_path_factory):
    """What low-rank methods measure on small models does not go into the user's folder; each is measured once."""
    from kvcompress.calibrate import low_rank

    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("lowrank")
    patch.setattr(low_rank, "folder", lambda: folder)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def written_without_waiting():
    """Files are written, and need not outlive a failure of power: no test waits for the disk."""
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", lambda handle: None)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def remembered_elsewhere(tmp_path_factory):
    """Commands that tests give are not remembered in the user's folder."""
    from kvcompress.commands import memo

    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("memos")
    patch.setattr(memo, "cache_dir", lambda: folder)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def filters_for_random_models():
    """Random models have no file of filters: tests of every method at once give them drawn ones."""
    from kvcompress.calibrate import calibration

    find, patch = calibration.find, pytest.MonkeyPatch()

    def found(model, places):
        tensors = find(model, places)
        return tensors if tensors is not None or model.config.hidden_size > 256 else {"filters": drawn_filters(model)}

    patch.setattr(calibration, "find", found)
    yield find
    patch.undo()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of published data sets (`paths.data`); tests of it are skipped where it is absent."""
    folder = Path(os.environ.get("KVCOMPRESS_DATA", "data"))
    if not (folder / "longbench_v1").is_dir():
        pytest.skip(f"no data sets in {folder}: set KVCOMPRESS_DATA to their folder")
    return folder
