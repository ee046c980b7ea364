"""Rollouts: groups sampled from a compressed cache, and their gap to the dense policy."""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch
from composed import composed
from small_models import small_model
from sweeps import ALONE, TOGETHER, forked, sweep

from kvcompress.data.rollouts import drawn, inverse_cdf, log_distribution, teacher_forced
from kvcompress.data.task import Sample, Turn
from kvcompress.hook.session import compress
from kvcompress.methods import H2O, KIVI, Full, Quest, SnapKV, StreamingLLM
from kvcompress.metrics import off_policy
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.sweep.record import RunFolder
from kvcompress.tasks import rollouts
from kvcompress.tasks.rollouts import Rollouts, gaps_of, never

PROMPT = tuple(torch.randint(5, 60, (40,), generator=torch.Generator().manual_seed(3)).tolist())
SAMPLE = Sample(
    "p", (PROMPT,), (Turn((), 12, stop=(2,), references=("yes",)),), {"reward": "match", "template": "none"}, {}
)


def sampled(method, model=None, **settings):
    """What the task says of one group on a small random model."""
    model = small_model() if model is None else model
    task = Rollouts(**({"n_samples": 4, "output": 12} | settings))
    out = task.run(compress(model, method), SAMPLE)
    return task, out


def row(task, out):
    """A finished row of `samples.jsonl`, as far as `summarise` reads it."""
    out = out | {"text": ["yes" if number == 0 else "no" for number in range(task.n_samples)]}
    return {"id": "p", "out": json.loads(json.dumps(out)), "scores": task.score(SAMPLE, out)}


def test_the_full_cache_is_on_policy_to_rounding():
    _, out = sampled(Full())
    assert all(abs(one).max() < 1e-5 for one in gaps_of(out))


def test_an_evicting_method_at_full_budget_is_on_policy_to_rounding():
    _, out = sampled(SnapKV(budget=1.0))
    assert all(abs(one).max() < 1e-5 for one in gaps_of(out))


@pytest.mark.parametrize("method", [SnapKV(budget=0.3), H2O(budget=0.3), KIVI(bits=2, group=16, residual=16)])
def test_a_compressed_sampler_is_off_policy_and_its_own_scorer_is_not(method):
    _, out = sampled(method, score_by=("dense", "self"))
    assert max(abs(one).max() for one in gaps_of(out)) > 1e-4
    if not isinstance(method, KIVI):  # whose residual is encoded in other steps where tokens are known
        assert all(abs(one).max() < 1e-5 for one in gaps_of(out, "self"))


@pytest.mark.parametrize("method", [Full(), SnapKV(budget=0.3), StreamingLLM(budget=0.3), Quest(budget=0.5)])
def test_the_same_seeds_give_the_same_samples_alone_and_in_a_batch(method):
    _, together = sampled(method)
    _, alone = sampled(method, batch=1)
    assert together["tokens"] == alone["tokens"]
    assert np.allclose(together["rollouts"]["mu"][0], alone["rollouts"]["mu"][0], atol=1e-5)


def test_samples_of_a_shared_prefill_equal_those_of_prefills_of_their_own():
    _, shared = sampled(SnapKV(budget=0.3))
    _, apart = sampled(SnapKV(budget=0.3), share_prefix=False)
    assert shared["tokens"] == apart["tokens"]
    assert apart["rollouts"]["bytes"]["group"] == apart["rollouts"]["bytes"]["unshared"]


def test_samples_of_a_group_differ_and_another_seed_gives_others():
    _, out = sampled(Full())
    _, other = sampled(Full(), seed=1)
    assert len({tuple(tokens) for tokens in out["tokens"]}) > 1 and out["tokens"] != other["tokens"]


def test_a_group_holds_its_prompt_once_where_no_step_evicts():
    _, full = sampled(Full())
    held = full["rollouts"]["bytes"]
    tokens = [len(one) - (end == "length") for one, end in zip(full["tokens"], full["finished"], strict=True)]
    of_a_token = held["unshared"] / (4 * len(PROMPT) + sum(tokens))
    assert held["group"] == pytest.approx((len(PROMPT) + sum(tokens)) * of_a_token, rel=0.02)


def test_a_group_shares_nothing_where_steps_evict_prompt_tokens():
    _, out = sampled(H2O(budget=0.3))
    assert out["rollouts"]["bytes"]["group"] == out["rollouts"]["bytes"]["unshared"]


def test_the_written_bytes_of_groups_follow_from_the_rule():
    prompt, output, k = 1000, 200, 8
    assert (k * (prompt + output), prompt + k * output) == (9600, 2600)
    assert (prompt // 10 + k * output, k * (prompt // 10 + output)) == (1700, 2400)


def test_enumerated_over_a_vocabulary_the_mean_ratio_is_one_and_rewards_become_the_dense_ones():
    model, ids = small_model(vocab_size=64), torch.tensor([PROMPT])
    found = []
    for method in (SnapKV(budget=0.2), Full()):
        with compress(model, method) as session:
            session.prefill(ids)
            found.append(log_distribution(session.step(torch.tensor([[7]])), 1.0)[0].double())
    mu, pi = found
    ratio, reward = (pi - mu).exp(), torch.rand(len(mu), generator=torch.Generator().manual_seed(0)).double()
    assert float((mu - pi).abs().max()) > 1e-4
    assert float((mu.exp() * ratio).sum()) == pytest.approx(1.0, abs=1e-6)
    assert float((mu.exp() * ratio * reward).sum()) == pytest.approx(float((pi.exp() * reward).sum()), abs=1e-6)


def test_a_token_is_drawn_as_often_as_its_probability_says():
    logprobs = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).log().expand(1000, -1)
    tokens = inverse_cdf(logprobs, (torch.arange(1000) + 0.5).double() / 1000)
    assert torch.bincount(tokens, minlength=4).tolist() == [500, 0, 300, 200]


def test_log_probabilities_are_of_the_tempered_distribution():
    model = small_model()
    with compress(model, Full()) as session:
        session.prefill(torch.tensor([PROMPT]))
        session.cache.batch_repeat_interleave(2)
        group = drawn(session, SAMPLE.turns[0], 0.5, [1, 2])
    with compress(model, Full()) as session:
        scored = teacher_forced(session, [PROMPT], group.sampled, 0.5, 2)
        other = teacher_forced(session, [PROMPT], group.sampled, 1.0, 2)
    assert np.allclose(scored[0], group.logprobs[0], atol=1e-5)
    assert not np.allclose(other[0], group.logprobs[0], atol=1e-3)


def test_the_end_token_is_scored_and_is_no_part_of_the_answer():
    model = small_model()
    with compress(model, Full()) as session:
        session.prefill(torch.tensor([PROMPT]))
        free = drawn(session, Turn((), 6), 1.0, [5])
    stop = free.sampled[0][3]
    at = free.sampled[0].index(stop)
    with compress(model, Full()) as session:
        session.prefill(torch.tensor([PROMPT]))
        ended = drawn(session, Turn((), 6, stop=(stop,)), 1.0, [5])
    assert ended.finished == ["stop"] and ended.sampled[0] == free.sampled[0][: at + 1]
    assert ended.tokens[0] == free.sampled[0][:at] and len(ended.logprobs[0]) == at + 1


def test_a_record_says_gaps_rewards_bytes_and_simulated_schedules():
    task, out = sampled(SnapKV(budget=0.3))
    found = task.summarise([row(task, out)])
    every = np.concatenate(gaps_of(out))
    assert found["gap_k3"] == pytest.approx(off_policy.k3(every)) and found["gap_k3"] > 0
    assert found["reward_mean"] == 0.25 and found["pass_at_4"] == 1.0 and found["reward_signal"] == 1.0
    assert 0 < found["gap_ess"] <= 1 and found["bytes_ratio"] > 1
    assert found["simulated_makespan_continuous_s"] <= found["simulated_makespan_static_s"]
    assert len(found["curve_q1"]) == len(found["curve_position"]) == 16
    assert all(not isinstance(value, float) or math.isfinite(value) for value in found.values())


def test_a_sample_that_the_dense_model_rules_out_is_named_and_stays_in_the_means():
    task, out = sampled(SnapKV(budget=0.3))
    out["rollouts"]["dense"][2][3] = None
    found = task.summarise([row(task, out)])
    assert never(out) == [2] and found["gap_impossible_samples"] == ["p.2"]
    assert found["gap_samples"] == 4 and found["gap_seq_reject_1e4"] >= 0.25


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"top_p": 0.9}, "support"),
        ({"top_k": 5}, "support"),
        ({"temperature": 0.0}, "greedy"),
        ({"n_samples": 0}, "n_samples=0"),
        ({"source": "file"}, "task.file"),
        ({"source": "books"}, "valid: needle"),
        ({"score_by": ("self",)}, "dense"),
        ({"truncate": 0.5}, "truncate"),
        ({"output": 1}, "output=1"),
    ],
)
def test_settings_that_make_no_gap_are_refused_with_the_reason(settings, named):
    with pytest.raises(ValueError, match=named):
        Rollouts(**settings)


def test_prompts_of_a_file_are_sampled_with_and_without_answers(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "How much is 1 + 1?", "answer": "2"}\n{"question": "Say a word."}\n')
    task = Rollouts(source="file", file=str(file), n_prompts=2, template="none")
    first, second = task.samples(byte_tokenizer(512))
    assert first.protocol["reward"] == "match" and first.turns[0].references == ("2",)
    assert second.protocol["reward"] == "none" and task.gold(second) is None


def test_a_reward_without_answers_is_refused(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Say a word."}\n')
    task = Rollouts(source="file", file=str(file), n_prompts=1, template="none", reward="match")
    with pytest.raises(ValueError, match="needs answers"):
        list(task.samples(byte_tokenizer(512)))


@pytest.mark.parametrize("line, named", [('{"text": "x"}', "row 1"), ('{"prompt": "x", "answer": ""}', "empty answer")])
def test_rows_of_a_file_that_are_no_prompts_are_named(tmp_path, line, named):
    file = tmp_path / "p.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ValueError, match=named):
        list(Rollouts(source="file", file=str(file), n_prompts=1, template="none").samples(byte_tokenizer(512)))


def run_of_three_prompts(folder, killed=0, options=ALONE, methods=("method=snapkv",)):
    """Cells of three groups each; killed when so many groups are written, if asked for."""
    prompts = folder.parent / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "Count to {number}."}}\n' for number in (3, 5, 7)))
    if killed:
        stock, written = RunFolder.append, []

        def append(self, row):
            stock(self, row)
            written.append(row)
            if len(written) == killed:
                os.kill(os.getpid(), signal.SIGKILL)

        RunFolder.append = append
    asked = ["model=random", "task=rollouts", "task.source=file", f"task.file={prompts}", "task.template=none"]
    asked += ["task.n_prompts=3", "task.n_samples=2", "task.output=6", "budget=0.5", "device=cpu"]
    asked += ["paths.data=null", "sweep.name=test", f"paths.results={folder}"]
    return sweep([composed(*asked, *method.split()) for method in methods], options)[0]


def rows_of(folder):
    rows = [json.loads(line) for path in folder.rglob("samples.jsonl") for line in path.read_text().splitlines()]
    return [(row["id"], row["out"]["tokens"], row["out"]["rollouts"]["mu"]) for row in rows]


def test_a_killed_run_goes_on_sample_by_sample_with_the_same_samples(tmp_path):
    process = forked(run_of_three_prompts, tmp_path / "killed", 1)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    begun = rows_of(tmp_path / "killed")
    assert len(begun) == 1 and not list((tmp_path / "killed").rglob("record.json"))
    run_of_three_prompts(tmp_path / "killed")
    run_of_three_prompts(tmp_path / "calm")
    assert rows_of(tmp_path / "killed")[:1] == begun
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "calm")


MIXED = ("method=snapkv", "method=h2o", "method=streamingllm")  # prefills of three kinds


def of_cells(folder):
    """Rows by cell."""
    found = {}
    for path in sorted(folder.rglob("samples.jsonl")):
        found[path.parent.name] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def test_cells_that_sample_in_common_forwards_draw_what_each_draws_alone(tmp_path, monkeypatch):
    run_of_three_prompts(tmp_path / "alone", methods=MIXED)
    scored, stock = [], rollouts.teacher_forced
    monkeypatch.setattr(rollouts, "teacher_forced", lambda *a: scored.append(len(a[2])) or stock(*a))
    outcomes = run_of_three_prompts(tmp_path / "together", options=TOGETHER, methods=MIXED)
    assert [outcome.record["protocol.decoding"] for outcome in outcomes] == ["together"] * 3
    assert {outcome.status for outcome in outcomes} == {"ok"}  # with curves that end before the longest output
    assert scored == [6] * 3  # the dense model reads the samples of all three cells at once
    alone, together = of_cells(tmp_path / "alone"), of_cells(tmp_path / "together")
    assert alone.keys() == together.keys()
    for cell, rows in alone.items():
        for row, again in zip(rows, together[cell], strict=True):
            assert again["out"]["tokens"] == row["out"]["tokens"]
            assert again["out"]["rollouts"]["bytes"] == row["out"]["rollouts"]["bytes"]
            for name in ("mu", "dense"):
                for one, other in zip(row["out"]["rollouts"][name], again["out"]["rollouts"][name], strict=True):
                    assert np.allclose(one, other, atol=1e-4)
    assert all("metrics.tokens_per_s" not in outcome.record for outcome in outcomes)
    assert all(row["out"]["rollouts"]["wall_s"] is None for rows in together.values() for row in rows)


@pytest.mark.long
def test_cells_that_sample_together_go_on_sample_by_sample_after_a_kill(tmp_path):
    two = ("method=snapkv", "method=h2o")
    process = forked(run_of_three_prompts, tmp_path / "killed", 3, TOGETHER, two)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    begun = of_cells(tmp_path / "killed")
    assert sorted(map(len, begun.values())) == [1, 2]
    run_of_three_prompts(tmp_path / "killed", options=TOGETHER, methods=two)
    run_of_three_prompts(tmp_path / "calm", options=TOGETHER, methods=two)
    whole, calm = of_cells(tmp_path / "killed"), of_cells(tmp_path / "calm")
    for cell, rows in whole.items():
        assert rows[: len(begun[cell])] == begun[cell]
        assert [row["out"]["tokens"] for row in rows] == [row["out"]["tokens"] for row in calm[cell]]
