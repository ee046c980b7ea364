"""Models with adapters (peft): each method gives what it gives on the merged model, or refuses by name."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from helpers import REPRESENTATIVE, every_method, make, thinned
from small_models import CharacterTokenizer, random_ids
from small_models import small_model as shared_model

from kvcompress import compress
from kvcompress.calibrate import calibration
from kvcompress.methods import METHODS, CacheBlend, CriticalKV, DuoAttention, FlexiCache, Full, Int8, QFilters
from kvcompress.models import compat
from kvcompress.models.model_hash import adapter_state, model_hash, same_weights, weight_sample
from kvcompress.models.projections import check_linear, effective_weight
from kvcompress.models.tokenizers import remember_tokenizer
from kvcompress.reuse.kv_store import KVStore
from kvcompress.reuse.prefix import PrefixReuse

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:`is_gradient_checkpointing`")

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STATES = ("first", "second", "off")
OF_WEIGHTS = ("CriticalKV", "LowRank", "CacheBlend")  # read or store what follows from weights
LIKE = torch.empty(0)


def small_model(architecture="llama", **options):
    """A model of the test's own, which it may alter."""
    return shared_model(architecture, fresh=True, **options)


def with_adapters(model, targets=LINEAR, **options):
    """Two random adapters, the first active, as peft puts them into a model."""
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=False, **options)
        model = peft.inject_adapter_in_model(config, model, name)
    switch(model, "first")
    return model.eval().requires_grad_(False)


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)]


def switch(model, state):
    for layer in layers_of(model):
        layer.enable_adapters(state != "off")
        if state != "off":
            layer.set_adapter(state)


def merged(model, state):
    """A copy with the adapter in its weights, and no trace of peft."""
    plain = copy.deepcopy(model)
    for parent in list(plain.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
                if state != "off":
                    layer.enable_adapters(True)
                    layer.merge(adapter_names=[state])
                setattr(parent, name, layer.get_base_layer())
    remember_tokenizer(plain, CharacterTokenizer())
    return plain.requires_grad_(False)


@pytest.fixture(scope="module")
def llama():
    model = with_adapters(small_model()).double()  # codes do not flip by the rounding of a merge
    return model, {state: merged(model, state) for state in STATES}


def made(name):
    """A method whose bases, where it measures some, come from one forward over prose."""
    return make(name, 0.5, **({"text": "prose"} if name == "LowRank" else {}))


def followed(model, method, segments, steps=3):
    """Logits of a prompt and of some steps."""
    with compress(model, method) as session:
        found = [session.prefill(segments).logits]
        found += [session.step(ids) for ids in random_ids(1, steps, seed=9).split(1, dim=1)]
    return torch.stack(found)


def test_the_adapters_of_these_tests_matter(llama):
    model, plain = llama
    logits = [plain[state](random_ids(1, 20)).logits for state in STATES]
    assert min((logits[i] - logits[j]).abs().max() for i, j in ((0, 1), (0, 2), (1, 2))) > 0.1


@pytest.mark.parametrize(
    "name", every_method(sorted(METHODS), short=(*REPRESENTATIVE, *OF_WEIGHTS, "KIVI", "ShadowKV"))
)
def test_a_method_on_an_active_and_a_switched_adapter_equals_the_merged_model(llama, name):
    model, plain = llama
    method = made(name)
    segments = [random_ids(1, n, seed=n) for n in (10, 14, 9)]
    for state in STATES:
        switch(model, state)
        found = followed(model, method, segments)
        assert (found - followed(plain[state], method, segments)).abs().max() <= 1e-4, state


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OF_WEIGHTS else pytest.mark.long) for n in sorted(METHODS)]
)
def test_a_method_on_a_layer_that_peft_has_merged_in_place_equals_the_merged_model(name):
    model = with_adapters(small_model()).double()
    method, segments = made(name), [random_ids(1, n, seed=n) for n in (10, 14, 9)]
    plain = merged(model, "second")
    switch(model, "second")
    followed(model, method, segments)  # what it stores or measures must not be taken after the merge for something else
    for layer in layers_of(model):
        layer.merge()
    assert (followed(model, method, segments) - followed(plain, method, segments)).abs().max() <= 1e-4
    for layer in layers_of(model):
        layer.unmerge()
    switch(model, "off")
    assert (followed(model, method, segments) - followed(merged(model, "off"), method, segments)).abs().max() <= 1e-4


# ---------------------------------------------------------------------- stores and prefixes


@pytest.mark.parametrize("method", [CacheBlend(ratio=0.15), Full(prefill=PrefixReuse())], ids=["cacheblend", "prefix"])
def test_nothing_stored_under_one_adapter_is_served_under_another_in_one_session(method):
    model = with_adapters(small_model())
    segments = [random_ids(1, n, seed=n) for n in (6, 20, 15, 9)]
    plain = {state: merged(model, state) for state in STATES}
    with compress(model, method) as session:
        for state in ("first", "second", "first", "off"):
            switch(model, state)
            found = session.prefill(segments).logits
            with compress(plain[state], method) as alone:
                assert (found - alone.prefill(segments).logits).abs().max() <= 1e-4, state


def test_a_store_that_was_given_is_refused_by_name_once_the_adapter_is_switched():
    model = with_adapters(small_model())
    segments = [random_ids(1, n, seed=n) for n in (6, 20, 9)]
    store = KVStore(model)
    with compress(model, CacheBlend(), store=store) as session:
        session.prefill(segments)
        switch(model, "second")
        for act in (lambda: session.prefill(segments), lambda: session.precompute(segments)):
            with pytest.raises(ValueError, match="chunks of another model.*weights"):
                act()
        switch(model, "first")
        session.prefill(segments)
        assert store.stats.hits >= 2


def test_a_folder_keeps_the_chunks_of_two_adapters_apart(tmp_path):
    model = with_adapters(small_model())
    ids = random_ids(1, 12)[0]
    keys = {}
    for state in STATES:
        switch(model, state)
        store = KVStore(model, folder=tmp_path)
        keys[state] = store.key(ids)
        assert store.get(ids) is None
        rows = [torch.full((1, 2, 12, 16), float(len(keys)))] * 3
        store.put(ids, rows, rows)
    assert len(set(keys.values())) == 3
    for number, state in enumerate(STATES):
        switch(model, state)
        assert float(KVStore(model, memory_bytes=0, folder=tmp_path).get(ids).layer(0)[0].mean()) == number + 1


# ---------------------------------------------------------------------- what a model is known by


def test_a_models_hash_follows_its_adapters():
    """It changes when one is put in, switched, turned off, scaled, merged, or trained on, and comes back with the state."""
    base = model_hash(small_model())
    model = with_adapters(small_model())
    layer = model.model.layers[1].self_attn.v_proj

    def trained():
        layer.lora_B["first"].weight.data[0, 0] += 1

    first = model_hash(model)
    seen = {base, first}
    changes = [lambda: switch(model, "second"), lambda: switch(model, "off")]
    changes += [lambda: (switch(model, "first"), layer.scale_layer(2.0)), lambda: layer.merge(), trained]
    for change in changes:
        change()
        seen.add(model_hash(model))
    assert len(seen) == 2 + len(changes)
    again = with_adapters(small_model())
    assert model_hash(again) == first  # the same in another model, and so in another process


def test_a_plain_model_has_no_adapter_state_in_or_out_of_a_session():
    model = small_model()
    before = model_hash(model)
    with compress(model, Full()) as session:
        session.prefill(random_ids(1, 8))
        assert adapter_state(model) == "" and model_hash(model) == before


def test_hooks_and_forwards_that_others_put_in_are_part_of_a_models_hash():
    """Steering by a hook, with another direction, and a replaced forward; once they are gone it is the model again."""
    model = small_model()
    before, seen = model_hash(model), set()
    module = model.model.layers[0].self_attn.v_proj

    def steer(by):
        return module.register_forward_hook(lambda m, a, output: output + by)

    for by in (torch.ones(32), 2 * torch.ones(32), 0.5, 0.25):
        handle = steer(by)
        seen.add(model_hash(model))
        handle.remove()
    module.forward = lambda x: 2 * type(module).forward(module, x)
    seen.add(model_hash(model))
    del module.forward
    assert len(seen) == 5 and before not in seen and model_hash(model) == before


def test_a_parametrisation_that_is_switched_changes_the_hash():
    """As LoRA by torch.nn.utils.parametrize is switched: a function of the parametrisation is replaced."""

    class Added(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.delta, self.made = torch.nn.Parameter(torch.ones(32, 64)), self.add

        def add(self, weight):
            return weight + self.delta

        def forward(self, weight):
            return self.made(weight)

    model = small_model()
    module = model.model.layers[0].self_attn.v_proj
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Added())
    on, state = effective_weight(module, 64, LIKE).clone(), model_hash(model)
    module.parametrizations.weight[0].made = lambda weight: weight
    assert model_hash(model) != state
    assert torch.allclose(on - effective_weight(module, 64, LIKE), torch.ones(32, 64), atol=1e-5)


# ---------------------------------------------------------------------- measured files


@pytest.fixture
def only_files(filters_for_random_models, monkeypatch, tmp_path):
    """Filters come from files, the user's folder is empty."""
    monkeypatch.setattr(calibration, "find", filters_for_random_models)
    monkeypatch.setenv("KVCOMPRESS_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "method",
    [QFilters(budget=0.5, window=2), DuoAttention(budget=0.5), FlexiCache(budget=64)],
    ids=lambda m: type(m).__name__,
)
def test_what_was_not_measured_on_an_adapter_is_refused_and_says_so(only_files, method):
    with pytest.raises(ValueError, match="bears an adapter"):
        compress(with_adapters(small_model()), method)


def test_a_measured_file_is_found_under_its_adapter_alone(only_files):
    model = with_adapters(small_model())
    calibration.save(only_files / "m.safetensors", model, {"filters": torch.ones(1)}, {})
    assert calibration.find(model, [only_files]) is not None
    for state in ("second", "off"):
        switch(model, state)
        assert calibration.find(model, [only_files]) is None
    assert calibration.find(merged(model, "first"), [only_files]) is None


def test_an_adapter_merged_into_one_matrix_makes_another_model(only_files):
    """Even where it changes the weights by a thousandth, and whatever the file's float type was."""
    base = small_model()
    calibration.save(only_files / "m.safetensors", base, {"filters": torch.ones(1)}, {})
    for matrix in ("layers.1.self_attn.v_proj", "layers.2.mlp.up_proj", "embed_tokens"):
        model = small_model()
        weight = model.model.get_submodule(matrix).weight.data
        weight += 0.001 * weight.std() * torch.ones(len(weight), 1) @ torch.randn(1, weight.shape[1])
        assert calibration.find(model, [only_files]) is None, matrix
    for dtype in (torch.bfloat16, torch.float16):
        assert calibration.find(small_model().to(dtype), [only_files]) is not None
        sample = weight_sample(small_model().to(dtype))
        assert same_weights(sample, weight_sample(base)) and same_weights(sample.tolist(), weight_sample(base))


# ---------------------------------------------------------------------- effective weights


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False),
        peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False, use_dora=True),
        peft.IA3Config(target_modules=["o_proj"], feedforward_modules=[], init_ia3_weights=False),
        peft.LoHaConfig(r=2, target_modules=["o_proj"], init_weights=False),
    ],
    ids=["lora", "dora", "ia3", "loha"],
)
def test_the_effective_weight_is_what_peft_merges(config):
    model = peft.inject_adapter_in_model(config, small_model()).eval().requires_grad_(False)
    layer = model.model.layers[1].self_attn.o_proj
    assert not torch.allclose(effective_weight(layer, 64, LIKE), layer.get_base_layer().weight)
    found = effective_weight(layer, 64, LIKE)
    check_linear(layer, 64, LIKE)
    layer.merge()
    assert (found - layer.get_base_layer().weight).abs().max() <= 1e-5
    assert (effective_weight(layer, 64, LIKE) - layer.get_base_layer().weight).abs().max() <= 1e-5


def test_the_weight_of_a_plain_layer_is_its_own_tensor():
    layer = torch.nn.Linear(8, 4)
    assert effective_weight(layer, 8, LIKE) is layer.weight


def test_a_bias_is_no_part_of_the_weight():
    layer = torch.nn.Linear(8, 4)
    handle = layer.register_forward_hook(lambda m, a, output: 3 * output)
    assert torch.allclose(effective_weight(layer, 8, LIKE), 3 * layer.weight, atol=1e-6)
    handle.remove()


def test_dropout_in_training_is_refused_by_name():
    model = with_adapters(small_model(), lora_dropout=0.5)
    compress(model, CriticalKV(budget=0.5))
    for layer in layers_of(model):
        layer.train()
    with pytest.raises(ValueError, match="no output projection.*no product with one matrix"):
        compress(model, CriticalKV(budget=0.5))


@pytest.mark.parametrize(("architecture", "method"), thinned(["deepseek_v2", "deepseek_v3"], [Full(), Int8()], every=2))
def test_latents_are_read_through_the_adapter_of_the_up_projection(architecture, method):
    model = with_adapters(small_model(architecture), ["kv_b_proj", "o_proj", "kv_a_proj_with_mqa"])
    ids = random_ids(1, 20)
    for state in STATES:
        switch(model, state)
        assert (followed(model, method, ids) - followed(merged(model, state), method, ids)).abs().max() <= 1e-4, state


def test_an_adapter_that_is_switched_between_two_steps_is_read_at_the_next_one():
    """The latents held are the first adapter's, what is read of them the second's: as in the model's own forward."""
    ids, more = random_ids(1, 20), random_ids(1, 3, seed=5)
    model = with_adapters(small_model("deepseek_v3"), ["kv_b_proj"])
    cache = compat.DynamicCache(config=model.config)
    model(ids, cache=cache, use_cache=True)
    with compress(model, Full()) as session:
        session.prefill(ids)
        switch(model, "second")
        found = [session.step(token) for token in more.split(1, dim=1)]
    expected = [model(token, cache=cache, use_cache=True).logits[:, -1] for token in more.split(1, dim=1)]
    assert (torch.stack(found) - torch.stack(expected)).abs().max() <= 1e-4


def test_an_up_projection_that_cannot_be_asked_is_refused_by_name():
    model = with_adapters(small_model("deepseek_v3"), ["kv_b_proj"])
    layer = model.model.layers[0].self_attn.kv_b_proj
    layer.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {**kwargs, "adapter_names": ["first", "second"]}), with_kwargs=True
    )
    with pytest.raises(ValueError, match="kv_b_proj.*stands in for a linear layer.*merge the adapter"):
        compress(model, Full())


# ---------------------------------------------------------------------- steps that are recorded


def test_a_recorded_step_does_not_outlive_a_switch(monkeypatch):
    """A stand-in for compiling keeps what was computed when it was recorded; each switch records anew."""
    made = []
    monkeypatch.setattr(
        "kvcompress.hook.static_decode._compile",
        lambda model, forms, inputs: made.append(adapter_state(model)) or step_of(model, forms),
    )

    def step_of(model, forms):
        from kvcompress.hook.static_decode import step

        return lambda *tensors: step(model, forms, *tensors)

    model = with_adapters(small_model())
    with compress(model, Full(), decode="compiled") as session:
        session.prefill(random_ids(1, 12))
        for state in ("first", "first", "second", "off", "second"):
            switch(model, state)
            session.step(random_ids(1, 1))
    assert len(made) == 3 and len(set(made)) == 3


# ---------------------------------------------------------------------- what peft wraps a model in


def test_a_wrapped_model_is_refused_with_the_way_in():
    wrapped = peft.get_peft_model(small_model(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=re.escape("compress(model.get_base_model(), …)")):
        compress(wrapped, Full())
    with compress(wrapped.get_base_model(), Full()) as session:
        session.prefill(random_ids(1, 8))


def test_virtual_tokens_are_refused_by_name():
    config = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="virtual tokens"):
        compress(peft.get_peft_model(small_model(), config), Full())
