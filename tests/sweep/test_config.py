"""Hydra: every option of every group composes to its concrete type with every field; wrong names and keys fail."""

from __future__ import annotations

from dataclasses import fields
from itertools import zip_longest
from pathlib import Path

import pytest
from composed import composed
from helpers import CODED
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import kvcompress.conf
from kvcompress.method import Chunked, Uniform
from kvcompress.methods import METHODS
from kvcompress.sweep import components, config
from kvcompress.sweep.hydra_errors import one_line
from kvcompress.tasks import TASKS

FOLDER = Path(kvcompress.conf.__file__).resolve().parent


cell = composed
PAIRS = list(zip_longest(components.method_classes(), TASKS))  # composed together, as each composition takes its time


def cell_of(values, *, method=None, task=None):
    """A cell of a method or of a task, beside some other of the other kind."""
    pair = next(pair for pair in PAIRS if (pair[1] == task if method is None else pair[0] == method))
    return cell(f"method={pair[0] or 'full'}", f"task={pair[1] or 'needle'}", *values)


@pytest.mark.parametrize("name", components.method_classes())
def test_every_method_has_a_yaml_and_composes_to_its_class_with_every_field(name):
    cls = components.method_classes()[name]
    made = cell_of(["budget=0.5"], method=name)
    schema = OmegaConf.to_object(made.method)
    assert type(schema).__name__ == f"{cls.__name__}Config"
    own = {item.name for item in fields(cls) if item.repr} - set(components.METHOD_ELSEWHERE)
    assert own <= set(vars(schema))
    method = components.build_method(made)
    assert type(method) is cls and method == cls(budget=0.5)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_a_yaml_and_composes_to_its_class_with_its_defaults(name):
    made = cell_of(["seed=3", "paths.data=null"], task=name)
    assert components.build_task(made) == TASKS[name](seed=3)


@pytest.mark.parametrize("name", components.method_classes())
def test_a_value_that_is_not_the_default_reaches_the_method(name):
    cls = components.method_classes()[name]
    for item in fields(cls):
        if item.name in (*components.METHOD_ELSEWHERE, "preset"):
            continue
        default = getattr(cls(budget=0.5), item.name)
        if isinstance(default, bool):
            value: object = not default
        elif isinstance(default, int):
            value = default + 2  # stays odd where it must be
        else:
            continue
        try:
            expected = cls(**{"budget": 0.5, item.name: value})
        except ValueError:
            continue
        made = cell_of(["budget=0.5", f"method.{item.name}={value}"], method=name)
        assert components.build_method(made) == expected


def test_a_preset_fills_only_what_is_not_set():
    for name, cls in components.method_classes().items():
        made = cell_of(["budget=0.5"], method=name)
        for preset in cls.presets:
            made.method.preset = preset
            assert components.build_method(made) == cls(budget=0.5, preset=preset)


def test_parts_replace_the_methods_own_only_where_chosen():
    assert components.build_method(cell("method=h2o", "budget=0.5")).allocator is None
    method = components.build_method(
        cell("method=h2o", "budget=0.5", "allocator=uniform", "prefill=chunked", "prefill.chunk=64")
    )
    assert method.allocator == Uniform() and method.prefill == Chunked(64)


@pytest.mark.parametrize("name", CODED)
def test_a_method_that_only_says_how_tokens_are_held_is_a_codec_of_that_name(name):
    """`codec=NAME` has the settings of `method=NAME`, but for presets; defaults agree."""
    own = METHODS[name]().as_codec()
    assert own.name in config.options("codec", FOLDER) and own.name == name.lower()
    beside = "Full" if own.joint else "SnapKV"  # heads held together cannot evict apart
    method = components.build_method(cell(f"method={beside.lower()}", f"codec={own.name}"))
    assert method == METHODS[beside](codec=METHODS[name]()) and method.parts().codec == own


def test_a_codecs_settings_are_its_own_fields():
    method = components.build_method(cell("method=snapkv", "budget=0.25", "codec=kivi", "codec.bits=4"))
    assert method.parts().codec.bits == 4 and components.build_method(cell("method=kivi", "method.bits=4")).bits == 4
    with pytest.raises(ValueError, match="bits=3; valid: 2, 4, 8"):
        components.build_method(cell("method=snapkv", "codec=kivi", "codec.bits=3"))


def test_a_codecs_setting_where_none_is_chosen_names_the_methods_own():
    with pytest.raises(ConfigCompositionException) as error:
        cell("method=kivi", "codec.bits=3")
    assert one_line(error.value).endswith("bits is a setting of method=kivi: method.bits=3")
    with pytest.raises(ConfigCompositionException) as error:
        cell("method=snapkv", "codec.bits=3")
    assert one_line(error.value).endswith("choose one, as in codec=NAME codec.bits=3")


def test_int_and_float_budgets_keep_their_type():
    assert components.build_method(cell("method=random", "budget=64")).budget == 64
    assert isinstance(components.build_method(cell("method=random", "budget=1.0")).budget, float)


@pytest.mark.parametrize(
    "override", ["method.windw=3", "+method.windw=3", "task.lenghts=[3]", "bugdet=3", "method.window=abc", "+sweep.x=1"]
)
def test_unknown_keys_and_wrong_types_fail(override):
    with pytest.raises((ConfigCompositionException, OmegaConfBaseException, ValueError)):
        config.check_keys(cell("method=snapkv", override))
    config.check_keys(cell("method=snapkv", "codec=plain", "experiment=demo"))


def test_random_and_hub_models_are_choices():
    assert cell("model=random/qwen2").model.name == "random/qwen2"
    assert cell("model.name=/some/folder").model.name == "/some/folder"
    config.check_overrides(["model=Qwen/Qwen2.5-0.5B,smollm2"], FOLDER)
    assert cell("model=Qwen/Qwen2.5-0.5B").model.name == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(
    "override, hint",
    [
        ("method=h20", "did you mean h2o?"),
        ("task=needel", "did you mean needle?"),
        ("model=smolm2", "did you mean smollm2?"),
    ],
)
def test_a_wrong_name_lists_the_valid_ones_and_the_nearest(override, hint):
    config.register()
    with pytest.raises(ValueError) as error:
        config.check_overrides(["-m", override, "budget=0.5"], FOLDER)
    assert hint in str(error.value) and "Valid:" in str(error.value)
    for name in config.options(override.split("=")[0], FOLDER):
        assert name in str(error.value)


def test_the_demo_is_a_sweep_over_known_methods():
    params = OmegaConf.load(FOLDER / "experiment" / "demo.yaml").hydra.sweeper.params
    assert set(params.method.split(",")) == {"full", "random", "knorm", "snapkv", "adakv", "chunkkv"}
    made = cell("experiment=demo")
    assert made.sweep.name == "demo" and components.build_task(made).lengths == (1000,)


def test_every_yaml_is_a_choice_that_composes():
    """Debug sets what other groups must have: composed alone; of the others one of each at a time.

    Experiments are composed in `test_commands.py`.
    """
    composed_above = {*components.method_classes(), *TASKS}
    choices = {group: [] for group in config.GROUPS}
    for group, names in choices.items():
        for path in sorted((FOLDER / group).rglob("*.yaml")):
            name = str(path.relative_to(FOLDER / group).with_suffix(""))
            known = group in ("method", "task") and name in composed_above
            if not known and name not in config.AGENTS.get(group, ()):  # wandb's own format
                names.append(f"{group}={name}")
    assert choices.pop("experiment")
    for alone in choices.pop("debug"):
        cell(alone)
    for several in zip_longest(*choices.values()):
        cell(*filter(None, several))


def test_the_slope_runs_every_method_from_no_limit_down_to_a_twentieth_on_both_tasks():
    params = OmegaConf.load(FOLDER / "experiment" / "slope.yaml").hydra.sweeper.params
    assert params.method == "glob(*,exclude=base_*)"
    budgets = [float(value) for value in params.budget.split(",")]
    assert budgets == [round(1 - 0.05 * number, 2) for number in range(20)]
    needle, fidelity = (components.build_task(cell("experiment=slope", f"task={t}")) for t in params.task.split(","))
    assert (needle.name, needle.lengths) == ("needle", (600,))
    assert (fidelity.name, fidelity.prompt_tokens, fidelity.texts) == ("fidelity", 600, "builtin")


def test_the_fidelity_experiment_follows_five_texts_of_2000_tokens():
    made = cell("experiment=fidelity")
    task = components.build_task(made)
    assert task.n_texts == 5 and task.prompt_tokens + task.continuation_tokens == 2000
    params = OmegaConf.load(FOLDER / "experiment" / "fidelity.yaml").hydra.sweeper.params
    assert set(params.method.split(",")) <= set(components.method_classes())
