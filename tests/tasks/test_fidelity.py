"""Fidelity: what is measured is the drift of our logits from the full model's at each token, and nothing else."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from composed import composed
from helpers import every_method, make
from rich.console import Console
from safetensors.torch import save_file
from small_models import random_ids, small_model

from kvcompress import compress, load
from kvcompress.data.divergence import token_divergence
from kvcompress.data.task import Sample, Turn
from kvcompress.method import Method, Schedule
from kvcompress.methods import H2O, Full, SnapKV
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.sweep.references import FOLDER, References, _read
from kvcompress.tasks import Fidelity

SHORT = {"prompt_tokens": 60, "continuation_tokens": 12, "n_texts": 2}


def sample_of(length=40, more=12, seed=0, source="text"):
    ids = random_ids(1, length + more, seed)[0].tolist()
    turn = Turn(tuple(ids[length:]), 0) if source == "text" else Turn((), more)
    return Sample("s", (tuple(ids[:length]),), (turn,))


def measured(model, method, sample, task=None):
    """A sample's `out` and score under a method, against a reference of the same model."""
    task = task or Fidelity()
    with compress(model, Method()) as session:
        sample = replace(sample, reference=task.reference(session, sample))
    with compress(model, method) as session:
        out = task.run(session, sample)
    return out, task.score(sample, out), sample


def test_divergence_agreement_and_perplexity_equal_a_loop_over_the_vocabulary():
    generator = torch.Generator().manual_seed(0)
    full, ours = (3 * torch.randn(5, 7, generator=generator) for _ in range(2))
    tokens = [0, 3, 6, 2, 2]
    found = token_divergence(full, ours, torch.tensor(tokens))
    for i, token in enumerate(tokens):
        p, q = ([math.exp(x) for x in row[i].tolist()] for row in (full, ours))
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        kl = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
        assert found["kl"][i] == pytest.approx(kl, abs=1e-6) and kl > 0.1
        assert found["agree"][i] == (p.index(max(p)) == q.index(max(q)))
        assert found["nll"][i] == pytest.approx(-math.log(q[token]), abs=1e-5)
        assert found["nll_full"][i] == pytest.approx(-math.log(p[token]), abs=1e-5)
    assert max(token_divergence(full, full, torch.tensor(tokens))["kl"]) == 0.0


def test_a_token_the_full_model_rules_out_adds_nothing_and_logits_that_are_no_numbers_are_refused():
    full = torch.tensor([[0.0, 1.0, -math.inf]])
    found = token_divergence(full, torch.tensor([[0.0, 1.0, -50.0]]), torch.tensor([1]))
    assert found["kl"][0] == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError, match="not numbers"):
        token_divergence(full, torch.full((1, 3), math.nan), torch.tensor([1]))


@pytest.mark.parametrize("source", ["text", "generation"])
@pytest.mark.parametrize("name", every_method())
def test_at_budget_one_no_method_drifts_and_below_it_all_do(name, source):
    model = small_model()
    sample = sample_of(source=source)
    out, score, _ = measured(model, make(name, 1.0), sample)
    assert score["score"] == 1.0 and score["kl"] <= 1e-6 and max(out["positions"]["kl"]) <= 1e-6
    assert score["perplexity_ratio"] == pytest.approx(1.0, abs=1e-4)
    out, score, _ = measured(model, make(name, 0.3), sample)
    assert len(out["positions"]["kl"]) == 12 and score["kl"] > 1e-3


@pytest.mark.parametrize("method", [SnapKV(budget=0.3, window=3), H2O(budget=12), Full()])
def test_what_is_compared_at_each_token_are_the_logits_of_plain_decode_steps(method):
    """The quick way, many tokens in a forward, is taken only where single steps give the same."""
    model, sample = small_model(), sample_of()
    out, _, sample = measured(model, method, sample)
    tokens = sample.turns[0].ids
    with compress(model, method) as session, torch.no_grad():
        rows = [session.prefill(torch.tensor([sample.segments[0]])).logits]
        rows += [session.step(torch.tensor([[token]])) for token in tokens[:-1]]
        steps, end = torch.cat(rows), session.report()["kv"]
    found = token_divergence(sample.reference["logits"], steps, torch.tensor(tokens))
    for key, values in found.items():
        assert out["positions"][key] == pytest.approx(values, abs=2e-5)
    spare = "bytes_allocated"  # buffers grow by what comes at once
    assert {**out["end"]["kv"], spare: 0} == {**end, spare: 0}
    assert out["held"][0] == out["compressed"]["kv"]["bytes_held"] and out["held"][-1] == end["bytes_held"]


def test_following_in_blocks_of_any_size_and_by_steps_gives_the_same_logits_and_cache():
    model, ids = small_model(), random_ids(2, 40)

    def follow(method, block):
        with compress(model, method) as session:
            session.prefill(ids[:, :20])
            logits = torch.cat(list(session.follow(ids[:, 20:30], block)), 1)
            assert session.cache.get_seq_length() == 29  # as after generate(): the last token is picked, not fed
            more = torch.cat(list(session.follow(ids[:, 30:], block)), 1)
            return torch.cat([logits, more], 1), session.cache.kept_tokens()

    steps = follow(SnapKV(budget=0.5, window=3, schedule=Schedule(every=100)), 64)  # never due, but it might be
    for block in (1, 3, 64):
        logits, kept = follow(SnapKV(budget=0.5, window=3), block)
        assert logits.shape[1] == 20 and (logits - steps[0]).abs().max() <= 1e-5
        assert torch.equal(kept, steps[1])


def test_following_nothing_or_without_a_prompt_is_refused():
    model = small_model()
    with compress(model, Full()) as session:
        session.prefill(random_ids(1, 5))
        with pytest.raises(ValueError, match="nothing to follow"):
            next(session.follow(random_ids(1, 5)[:, :0]))
        model(random_ids(1, 3), cache=session.cache)
        with pytest.raises(ValueError, match="predicts the first token"):
            next(session.follow(random_ids(1, 3)))


def test_a_generation_is_the_full_models_own_and_ends_with_its_end_token():
    model = small_model()
    sample = sample_of(source="generation")
    with compress(model, Full()) as session:
        session.prefill(torch.tensor([sample.segments[0]]))
        expected = session.generate(12).tokens[0]
    _, _, whole = measured(model, SnapKV(budget=0.5), sample)
    assert whole.reference["tokens"].tolist() == expected
    end = expected[5]
    stopping = replace(sample, turns=(Turn((), 12, stop=(end,)),))
    _, _, short = measured(model, SnapKV(budget=0.5), stopping)
    assert short.reference["tokens"].tolist() == expected[: expected.index(end) + 1]
    sampled = Fidelity(source="generation", temperature=1.0, seed=3)
    first, second = (measured(model, Full(), sample, sampled)[2].reference["tokens"] for _ in range(2))
    assert torch.equal(first, second) and first.tolist() != expected


def test_built_in_texts_need_no_data_are_exact_in_length_and_follow_from_the_seed():
    tokenizer = byte_tokenizer()
    first, again, other = (list(Fidelity(seed=s, **SHORT).samples(tokenizer)) for s in (0, 0, 1))
    assert first == again and [s.segments for s in first] != [s.segments for s in other]
    assert len({s.segments for s in first}) == 2
    for sample in first:
        assert len(sample.segments[0]) == 60 and len(sample.turns[0].ids) == 12
        assert sample.total_tokens() == 72
        whole = tokenizer.decode([*sample.segments[0], *sample.turns[0].ids], skip_special_tokens=True)
        assert whole.isascii() and len(whole) == 71  # one byte a token, and the beginning-of-sequence token


def test_texts_come_from_json_lines_and_short_ones_are_passed_over(tmp_path):
    texts = ["short", *(f"{number} " * 40 for number in range(4))]
    file = tmp_path / "set" / "a.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"id": i, "context": text}) + "\n" for i, text in enumerate(texts)))
    tokenizer = byte_tokenizer()
    task = Fidelity(texts="set/a.jsonl", data=str(tmp_path), **SHORT | {"n_texts": 4})
    samples = list(task.samples(tokenizer))
    assert sorted(s.id.split("-P")[0] for s in samples) == [f"text-a-{number}" for number in (2, 3, 4, 5)]
    assert task.fingerprint()["texts_hash"] == Fidelity(texts=str(file)).fingerprint()["texts_hash"]
    with pytest.raises(ValueError, match="has 4 texts of at least 71 tokens"):
        list(replace(task, n_texts=5).samples(tokenizer))
    with pytest.raises(ValueError, match="line 1.*abstract.*task.field"):
        replace(task, field="abstract").fingerprint()
    generated = replace(task, source="generation", template="chat", instruction="\nSay more.", n_texts=5)
    prompts = [tokenizer.decode(s.segments[0]) for s in generated.samples(tokenizer)]
    assert all(text.endswith("\nSay more.<eos><turn>assistant\n") for text in prompts) and "short" in "".join(prompts)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"source": "nothing"}, "valid: text, generation"),
        ({"n_texts": 0}, "at least 1"),
        ({"prompt_tokens": 0}, "at least 1"),
        ({"template": "chat"}, "source=generation"),
        ({"temperature": 1.0}, "source=generation"),
        ({"source": "generation", "top_p": 0.0}, "in \\(0, 1\\]"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings, says):
    with pytest.raises(ValueError, match=says):
        Fidelity(**settings)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="nowhere.jsonl"):
        Fidelity(texts="nowhere.jsonl").fingerprint()


# ---------------------------------------------------------------------------------------------- through the runner


@pytest.fixture
def cell(tmp_path):
    short = [f"task.{key}={value}" for key, value in SHORT.items()]

    def make_cell(*overrides):
        fixed = ["model=random", "task=fidelity", *short, "device=cpu", f"paths.results={tmp_path}", "sweep.name=test"]
        return composed(*fixed, "paths.data=null", *overrides)

    return make_cell


@pytest.fixture
def runner():
    return Scheduler(Console(file=io.StringIO()))


def test_one_run_of_the_full_model_per_text_serves_all_cells(cell, runner, tmp_path, monkeypatch):
    calls = []
    reference = Fidelity.reference

    def counting(self, session, sample):
        calls.append(sample.id)
        return reference(self, session, sample)

    monkeypatch.setattr(Fidelity, "reference", counting)
    outcomes = [runner(cell(f"method={m}", f"budget={b}")) for m in ("snapkv", "h2o", "full") for b in (0.5, 0.2)]
    assert [o.status for o in outcomes] == ["ok"] * 5 + ["same"], outcomes[0].record.get("error")
    assert len(calls) == 2 == len(list((tmp_path / "test" / FOLDER).iterdir()))
    for file in (tmp_path / "test" / FOLDER).iterdir():
        file.write_bytes(b"cut short")
    runner(cell("method=tova", "budget=0.5"))
    assert len(calls) == 4  # a damaged reference is made again
    runner(cell("method=tova", "budget=0.5", "seed=1"))
    assert len(calls) == 6  # and another seed's texts are others


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 64
    path.write_bytes(bytes(content))


def save_less(path):
    save_file({"tokens": torch.zeros(3, dtype=torch.long)}, path)


@pytest.mark.parametrize("damage", [change_a_byte, save_less, Path.unlink])
def test_a_reference_that_was_damaged_is_made_again(damage, tmp_path):
    """Even where the file is well-formed: a changed byte of the logits would pass for a drift of the method."""
    model, tokenizer = load("random/llama", dtype="float32", device="cpu")
    task = Fidelity(**SHORT)
    sample, references = next(iter(task.samples(tokenizer))), References(tmp_path, "key")
    first = references.attach(task, sample, model).reference
    (file,) = (tmp_path / FOLDER).iterdir()
    assert torch.equal(_read(file)["logits"], first["logits"])
    damage(file)
    assert _read(file) is None
    again = references.attach(task, sample, model).reference
    assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)
    assert [one.name for one in (tmp_path / FOLDER).iterdir()] == [file.name] and _read(file) is not None


@torch.no_grad()
def test_perplexities_are_those_of_transformers_alone(cell, runner):
    """Of the full model over the continuation, given the prompt: one forward without any of our code."""
    found = runner(cell("method=streamingllm", "budget=0.5"))
    model, tokenizer = load("random/llama", dtype="float32", device="cpu")
    task = Fidelity(**SHORT)
    losses = []
    for sample in task.samples(tokenizer):
        prompt, forced = list(sample.segments[0]), list(sample.turns[0].ids)
        logits = model(torch.tensor([prompt + forced])).logits[0, len(prompt) - 1 : -1].double()
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(forced), reduction="none").tolist()
    expected = math.exp(sum(losses) / len(losses))
    assert found.record["metrics.perplexity_full"] == pytest.approx(expected, rel=1e-5)
    assert found.record["metrics.perplexity"] != pytest.approx(expected, rel=1e-5)


def test_the_record_sums_up_the_drift_and_its_course(cell, runner):
    full = runner(cell("method=full")).record
    found = runner(cell("method=snapkv", "budget=0.2")).record
    assert full["score"] == 1.0 and full["metrics.kl"] <= 1e-6 and full["metrics.perplexity_ratio"] == 1.0
    assert found["score"] < 1.0 and found["metrics.kl"] > 1e-3 and found["metric"] == "top1_agreement/1"
    assert found["metrics.perplexity_full"] == full["metrics.perplexity"]
    assert found["metrics.perplexity"] == pytest.approx(
        found["metrics.perplexity_ratio"] * found["metrics.perplexity_full"]
    )
    assert len(found["metrics.curve_kl"]) == len(found["metrics.curve_position"]) == 12
    assert found["metrics.curve_kl"][0] <= 1e-6 < found["metrics.curve_kl"][1]  # predicted before anything was evicted
    assert sum(found["metrics.curve_kl"]) / 12 == pytest.approx(found["metrics.kl"], rel=1e-4)
    assert found["kv.bytes_held"] < found["kv.bytes_mean"] < found["kv.bytes_peak"] < full["kv.bytes_mean"]
    assert found["protocol.source"] == "text" and found["protocol.hit_max_share"] == 0.0


def test_curves_of_long_runs_are_averaged_over_neighbours_and_lose_no_position():
    task = Fidelity()
    rows = [
        {"out": {"positions": {name: [float(i) for i in range(n)] for name in ("kl", "agree", "nll", "nll_full")}}}
        for n in (100, 40)
    ]
    found = task.summarise(rows)
    assert len(found["curve_kl"]) == 16 and found["curve_kl"] == pytest.approx(found["curve_position"], abs=1.0)
    assert found["kl"] == (49.5 + 19.5) / 2 and found["curve_position"][-1] <= 99


def test_tasks_without_a_reference_get_none(tmp_path):
    from kvcompress.tasks import Needle

    sample = sample_of()
    assert References(tmp_path, "key").attach(Needle(), sample, None) is sample
    with pytest.raises(ValueError, match="reference"):
        Fidelity().run(None, sample)


@pytest.mark.model
@pytest.mark.long
def test_on_the_embedded_model_budget_one_is_the_full_model_and_a_tenth_is_not(smollm2):
    model, tokenizer = smollm2
    sample = next(iter(Fidelity(prompt_tokens=200, continuation_tokens=16, n_texts=1).samples(tokenizer)))
    _, same, _ = measured(model, H2O(budget=1.0), sample)
    _, drifted, _ = measured(model, H2O(budget=0.1), sample)
    assert same["kl"] <= 1e-6 and same["score"] == 1.0 and drifted["kl"] > 0.1
