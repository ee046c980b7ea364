"""Cells composed once per choice of groups equal what Hydra composes for each."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from kvcompress.sweep import config
from kvcompress.sweep.compose import Composer
from kvcompress.sweep.launcher import plugin as _plugin  # noqa: F401  registers hydra/launcher=shared

CELLS = [
    ["method=snapkv", "budget=0.5"],
    ["method=snapkv", "budget=64", "seed=3"],
    ["method=snapkv", "method.window=16", "budget=0.5"],
    ["budget=0.25", "method=h2o", "task.lengths=[300,600]", "task.depths=[0.5]", "paths.results='a b'"],
    ["method=adakv", "budget=0.1", "allocator=own", "prefill=chunked", "prefill.chunk=64"],
    ["method=adakv", "budget=0.1", "hydra.launcher.share=false", "hydra/launcher=shared"],
    ["experiment=fidelity", "method=tova", "schedule.every=16", "limit=null"],
    ["experiment=demo", "method=tova", "budget=0.5", "sweep.name=${seed}"],
    ["model=random/qwen2", "method=full", "+model.options.extra=3", "budget=0.5"],
    ["method=snapkv", "method.window=8", "method.window=12", "~debug", "++budget=0.5"],
    ["+model.options={num_layers: 3}", "method=snapkv", "budget=1.0"],
]


@contextmanager
def loaders():
    """Hydra's own way to compose, and ours, over the same files."""
    config.register()
    with initialize_config_dir(str(config.folder()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        yield loader.load_configuration, Composer(loader)


def test_a_cell_equals_the_one_that_hydra_composes_whatever_came_before():
    with loaders() as (hydra, ours):
        all_expected = [hydra("config", overrides, RunMode.RUN) for overrides in CELLS]
        for _ in range(2):  # the second time all choices are known
            for overrides, expected in zip(CELLS, all_expected, strict=True):
                found = ours("config", overrides, RunMode.RUN)
                assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected), overrides
                for group in ("method", "task", "model"):
                    assert OmegaConf.get_type(found[group]) is OmegaConf.get_type(expected[group])
                assert OmegaConf.is_struct(found) and not found._get_flag("readonly")


def test_values_of_one_cell_do_not_reach_the_next():
    with loaders() as (_, ours):
        first = ours("config", ["method=snapkv", "budget=0.5", "task.lengths=[300]"], RunMode.RUN)
        first.task.lengths.append(5)
        second = ours("config", ["method=snapkv", "budget=0.25"], RunMode.RUN)
        assert second.budget == 0.25 and second.task.lengths != first.task.lengths
        assert ours("config", ["method=snapkv", "task.lengths=[300]"], RunMode.RUN).task.lengths == [300]


def test_hydra_composes_once_per_choice_of_groups(monkeypatch):
    with loaders() as (hydra, ours):
        made = []
        monkeypatch.setattr(ours, "own", lambda *arguments: made.append(arguments[1]) or hydra(*arguments))
        for method in ("snapkv", "tova"):
            for budget in (0.5, 0.25, 0.1):
                ours("config", [f"method={method}", f"budget={budget}"], RunMode.RUN)
        assert made == [["method=snapkv"], ["method=tova"]]


@pytest.mark.parametrize(
    "override", ["bugdet=0.5", "budget=a lot", "method.window=[1]", "task.lenghts=[3]", "budget=1,2"]
)
def test_what_hydra_refuses_is_refused_alike(override):
    with loaders() as (hydra, ours):
        texts = []
        for way in (hydra, ours):
            with pytest.raises(HydraException) as refused:
                way("config", ["method=snapkv", override], RunMode.RUN)
            texts.append((type(refused.value), str(refused.value), str(refused.value.__cause__)))
        assert texts[0] == texts[1]
