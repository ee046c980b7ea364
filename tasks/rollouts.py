"""Rollouts: what reinforcement learning gets from a sampler with a compressed cache, and how far off policy it is.

Per prompt one prefill is compressed and forked into a group of samples that decode as rows of one batch; the sampler's
log-probability of each token is kept when it is drawn. Afterwards the dense model (full cache) reads the same token ids,
and so may the method itself, teacher-forced. The gap between both is what importance sampling has to mend: Sparse-RL
(arXiv 2601.10079) and Sparrow (arXiv 2606.08446) report training that collapses from it.

The first token is drawn before a one-shot prefill has evicted anything; gaps are reported without it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import numpy as np
import torch

from kvcompress.common.hashing import content_hash
from kvcompress.common.prose import Encoder
from kvcompress.data import grading, jsonl, prompts
from kvcompress.data.haystack import prompt_template
from kvcompress.data.rollouts import Group, bytes_of_group, drawn, teacher_forced
from kvcompress.data.task import Sample, Task, Turn, prefill
from kvcompress.hook.joint_decoding import BatchedSession, in_common
from kvcompress.hook.session import compress
from kvcompress.measure.measuring import PeakMemory, synchronize
from kvcompress.measure.rollout_simulation import continuous_makespan, staleness, static_makespan
from kvcompress.method import Method
from kvcompress.metrics import off_policy
from kvcompress.tasks.gsm8k import GSM8K
from kvcompress.tasks.needle import Needle

SOURCES = ("needle", "gsm8k", "file")
SCORERS = ("dense", "self")
POINTS = 16  # of a curve by position: sixteenths of the output
QUANTILES = (0.001, 0.01, 0.05, 0.5)
NAMED = 8  # impossible samples that a record names
DIGITS = 7  # of a log-probability in a row


@dataclass(frozen=True, kw_only=True)
class Rollouts(Task):
    """Groups of samples from a compressed cache, scored by the dense model.

    Attributes:
        source: of prompts: "needle" (a number to find, answers known), "gsm8k" (problems of `paths.data` or the Hub) or
            "file" (JSON Lines: `prompt` or `question`, and `answer` or `answers` where a reward is wanted).
        file: for `source=file`, absolute or inside `paths.data`.
        n_prompts: prompts used; length: tokens of a needle prompt.
        n_samples: samples per prompt, all from one prefill.
        output: tokens of a sample at most; the model's end tokens end it sooner.
        temperature: of sampler and scorer alike. top_p and top_k must leave the support whole: 1 and 0.
        share_prefix: one prefill and forks of it; False prefills every sample, as the control of bytes and time.
        batch: samples decoded together; 0 for all of a group. It changes no sample.
        score_by: "dense" (full cache, always) and "self" (the method once more, teacher-forced).
        truncate: largest truncated importance weight.
        reward: "auto" ("math" for gsm8k, "match" where there are answers, else "none"), "math", "match" or "none".
        template: of the prompt, see `task=needle`.
        train_s, sync_s, workers, stale: of the simulated learner, see `measure/rollout_simulation.py`.
    """

    name: ClassVar[str] = "rollouts"
    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "reward_mean"
    metric_version: ClassVar[str] = "1"
    opens_sessions: ClassVar[bool] = True
    joins: ClassVar[bool] = True
    thinks: ClassVar[bool] = False

    source: str = "needle"
    file: str = ""
    n_prompts: int = 16
    length: int = 512
    n_samples: int = 8
    output: int = 96
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    share_prefix: bool = True
    batch: int = 0
    score_by: tuple[str, ...] = ("dense",)
    truncate: float = 2.0
    reward: str = "auto"
    template: str = "auto"
    train_s: float = 10.0
    sync_s: float = 1.0
    workers: int = 4
    stale: tuple[int, ...] = (0, 1, 4)

    def __post_init__(self) -> None:
        object.__setattr__(self, "score_by", tuple(self.score_by))
        object.__setattr__(self, "stale", tuple(self.stale))
        if self.source not in SOURCES:
            raise ValueError(f"task.source={self.source!r}; valid: {', '.join(SOURCES)}")
        if self.source == "file" and not self.file:
            raise ValueError("task.source=file needs task.file, a JSON Lines file with a prompt per row")
        for name, least in (("n_prompts", 1), ("n_samples", 1), ("output", 2), ("length", 1), ("workers", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"task.{name}={getattr(self, name)}; at least {least}: a rollout needs samples to score"
                )
        if self.batch < 0:
            raise ValueError(f"task.batch={self.batch}; 0 for all samples of a group, or how many decode together")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"task.temperature={self.temperature}; above 0: greedy samples have no distribution to compare"
            )
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"task.top_p={self.top_p}, task.top_k={self.top_k}; 1 and 0: a cut support makes ratios to the dense "
                "policy those of another distribution"
            )
        if "dense" not in self.score_by or not set(self.score_by) <= set(SCORERS):
            raise ValueError(f"task.score_by={list(self.score_by)}; dense, and self beside it where wanted")
        if not self.truncate >= 1:
            raise ValueError(f"task.truncate={self.truncate}; at least 1")
        if self.reward not in ("auto", "match", "math", "none"):
            raise ValueError(f"task.reward={self.reward!r}; valid: auto, match, math, none")
        if self.reward == "math" and not grading.available():
            raise ValueError("task.reward=math judges with math-verify: pip install 'kvcompress[reasoning]'")
        if not self.stale or min(self.stale) < 0 or self.train_s < 0 or self.sync_s < 0:
            raise ValueError("task.stale, task.train_s and task.sync_s are from 0, and one value of stale at least")

    # ------------------------------------------------------------------ prompts

    def _path(self) -> Path:
        path = Path(self.file)
        return path if path.is_absolute() else Path(self.data or ".") / path

    def fingerprint(self) -> dict[str, Any]:
        return {"prompts": content_hash(self._path())} if self.source == "file" else {}

    def settings(self) -> dict[str, Any]:
        """`batch` and the simulated learner change no sample and no gap."""
        aside = ("batch", "train_s", "sync_s", "workers", "stale")
        return {name: value for name, value in super().settings().items() if name not in aside}

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """One per prompt."""
        made = 0
        for sample, answers in self._prompts(tokenizer):
            kind = self._reward(bool(answers))
            turn = Turn((), self.output, references=answers if kind != "none" else ())
            yield Sample(
                id=f"{self.source}-{sample.id}-k{self.n_samples}-s{self.seed}",
                segments=sample.segments,
                turns=(turn,),
                protocol={
                    "question": "seen",
                    "template": sample.protocol["template"],
                    "sampling": f"{self.n_samples} samples at temperature {self.temperature:g}",
                    "reward": kind,
                    "prefix": "shared" if self.share_prefix else "apart",
                },
                meta=dict(sample.meta),
            )
            made += 1
            if made == self.n_prompts:
                return
        raise ValueError(f"task.source={self.source} gives {made} prompts, task.n_prompts={self.n_prompts} are wanted")

    def _reward(self, answers: bool) -> str:
        kind = self.reward
        if kind == "auto":
            kind = "none" if not answers else "math" if self.source == "gsm8k" else "match"
        if kind != "none" and not answers:
            raise ValueError(f"task.reward={kind} needs answers, and a prompt of task.source={self.source} has none")
        return kind

    def _prompts(self, tokenizer: Any) -> Iterator[tuple[Sample, tuple[str, ...]]]:
        """Prompts with their answers, as many as the source has."""
        if self.source == "needle":
            needle = Needle(
                lengths=(self.length,), depths=(0.5,), n_seeds=self.n_prompts, template=self.template, seed=self.seed
            )
            yield from ((sample, sample.turns[0].references) for sample in needle.samples(tokenizer))
        elif self.source == "gsm8k":
            problems = GSM8K(template=self.template, seed=self.seed, data=self.data)
            yield from ((sample, sample.turns[0].references) for sample in problems.samples(tokenizer))
        else:
            yield from self._of_file(tokenizer)

    def _of_file(self, tokenizer: Any) -> Iterator[tuple[Sample, tuple[str, ...]]]:
        path, encode = self._path(), Encoder(tokenizer)
        for number, row in enumerate(jsonl.read(path), 1):
            where = f"{path}, row {number}"
            text = row.get("prompt", row.get("question"))
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{where}: no text under prompt or question (has {', '.join(row) or 'nothing'})")
            jsonl.whole(text, "prompt (or question)", where)
            given = row.get("answers", row.get("answer"))
            given = [] if given is None else given if isinstance(given, list) else [given]
            answers = tuple(jsonl.answer(value, "answer", where).strip() for value in given)
            if any(not answer for answer in answers):
                raise ValueError(f"{where}: an empty answer rewards every text; leave it out or give one")
            wrap = prompt_template(tokenizer, encode, text, "", "", self.template)
            prompt = (*wrap.head, *wrap.tail)
            facts = prompts.facts(tokenizer, prompt)
            yield Sample(str(number), (prompt,), (Turn((), 1),), {"template": wrap.template}, facts), answers

    # ------------------------------------------------------------------ running

    def decoded_rows(self) -> int:
        return self.batch or self.n_samples

    @torch.no_grad()
    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """Sample a group in the session that is handed over (not open yet), then have it scored.

        Of a session that decodes with others' the times of decoding say nothing and are None; the dense model scores the
        samples of all at once.

        Returns:
            what any task returns with one entry of `tokens` and `finished` per sample; `rollouts`: log-probabilities of
            each sample's tokens under the sampler (`mu`) and the scorers (`dense`, `self`), the sampler's entropies, bytes
            of the group and seconds.
        """
        turn, model, tokenizer = sample.turns[0], session.model, session.tokenizer
        rows, apart = self.decoded_rows(), not isinstance(session, BatchedSession)
        group = Group([], [], [], [])
        with session as opened:
            device = model.device
            prompt_s, prompt_peak = prefill(opened, sample)
            compressed, prompt = opened.report(kept_map=True), opened.cache
            before, sizes, seconds = prompt.fork(), [], []
            synchronize(device)
            start = time.perf_counter()
            with PeakMemory(device) as peak:
                for first in range(0, self.n_samples, rows):
                    count = min(rows, self.n_samples - first)
                    if self.share_prefix:
                        opened.cache = before.fork()
                        if count > 1:
                            opened.cache.batch_repeat_interleave(count)
                    else:
                        opened.prefill([torch.tensor([segment] * count, device=device) for segment in sample.segments])
                    seeds = [self._seed(sample, number) for number in range(first, first + count)]
                    part = drawn(opened, turn, self.temperature, seeds)
                    group = group.joined(part)
                    seconds += part.step_s
                    sizes.append(bytes_of_group(before, opened.cache))
            synchronize(device)
            wall = time.perf_counter() - start
            end = opened.report()
        unshared = sum(total for total, _ in sizes)
        once = min(shared for _, shared in sizes) if self.share_prefix else 0
        found: dict[str, Any] = {"mu": group.logprobs, "entropy": group.entropy}
        found |= {"wall_s": wall if apart else None, "step_s": median(seconds) if seconds and apart else None}
        found["bytes"] = {"unshared": unshared, "group": unshared - (self.n_samples - 1) * once}
        ids = [list(map(int, segment)) for segment in sample.segments]

        def scored(how: Method, groups: list[list[list[int]]]) -> list[list[list[float]]]:
            every = [one for sampled in groups for one in sampled]
            with compress(model, how, tokenizer=tokenizer) as scorer:
                values = iter(teacher_forced(scorer, ids, every, self.temperature, rows))
            return [[next(values) for _ in sampled] for sampled in groups]

        for name in self.score_by:
            how, key = (Method(), "dense") if name == "dense" else (session.method, id(session))
            found[name] = in_common(session, key, partial(scored, how), group.sampled)
        for name in ("mu", "entropy", *self.score_by):
            found[name] = [[_short(value) for value in one] for one in found[name]]
        return {
            "tokens": group.tokens,
            "finished": group.finished,
            "compressed": compressed,
            "end": end,
            "ttft_s": prompt_s,
            "prefill_s": compressed["time"]["prefill_s"],
            "compress_s": compressed["time"]["compress_s"],
            "tpot_s": seconds,
            "prefill_peak": prompt_peak,
            "decode_peak": peak.peak,
            "rollouts": found,
        }

    def _seed(self, sample: Sample, number: int) -> int:
        """Of one sample's generator: the same whatever is decoded beside it."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{sample.id}:{number}".encode()).digest()[:7])

    # ------------------------------------------------------------------ rewards and gaps

    def gold(self, sample: Sample) -> list[str] | None:
        references = sample.turns[0].references
        if not references:
            return None
        right = f"Final answer: \\boxed{{{references[0]}}}" if sample.protocol["reward"] == "math" else references[0]
        return [right] * self.n_samples

    def rewards(self, sample: Sample, out: Mapping[str, Any]) -> list[float] | None:
        """0 or 1 per sample of the group; None where there is no reward."""
        references, kind = sample.turns[0].references, sample.protocol["reward"]
        if kind == "none":
            return None
        if kind == "math":
            judged = zip(out["text"], out["finished"], strict=True)
            return [float(grading.grade(references[0], text, end == "stop").right) for text, end in judged]
        return [float(any(answer.lower() in text.lower() for answer in references)) for text in out["text"]]

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """Mean reward of the group; without a reward the effective sample size of its truncated token weights."""
        rewards = self.rewards(sample, out)
        found: dict[str, float] = {}
        if rewards is not None:
            found = {"score": fmean(rewards), **{f"reward_{i}": reward for i, reward in enumerate(rewards)}}
        if "rollouts" in out:
            group = gaps_of(out)
            every = np.concatenate(group) if any(len(one) for one in group) else np.zeros(1)
            found |= {"gap_kl": off_policy.kl(every), "gap_k3": off_policy.k3(every)}
            weights = np.log(off_policy.truncated(every, self.truncate).clip(min=1e-300))
            found["gap_ess_token"] = off_policy.ess(weights)
            found.setdefault("score", found["gap_ess_token"])
        return found if "score" in found else found | {"score": 0.0}

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Gaps over all tokens and by position, rewards, diversity, bytes and times of groups; see docs/rollouts.md."""
        groups = [gaps_of(row["out"]) for row in rows]
        samples = [one for group in groups for one in group]
        every = np.concatenate(samples)
        sums = [np.array([one.sum() for one in group]) for group in groups]
        kept = off_policy.mask(every)
        found: dict[str, Any] = {
            "gap_kl": off_policy.kl(every),
            "gap_k3": off_policy.k3(every),
            "gap_chi2_token": off_policy.chi2_token(every),
            "gap_log_chi2_seq": off_policy.log_chi2_sequence(np.concatenate(sums)),
            "gap_ppl_ratio": math.exp(off_policy.kl(every)),
            "gap_ratio_share": float(1 - kept.mean()),
            "gap_masked_k3": off_policy.masked_mean(np.expm1(every) - every, kept),
            "gap_seq_reject": off_policy.rejected(samples, 1e-3),
            "gap_seq_reject_1e4": off_policy.rejected(samples, 1e-4),
            "gap_ess": fmean(off_policy.ess(one) for one in sums),
            "gap_ess_token": off_policy.ess(np.log(off_policy.truncated(every, self.truncate).clip(min=1e-300))),
            "gap_geometric": fmean(math.exp(one.mean()) for one in samples if len(one)),
            "gap_samples": len(samples),
            "gap_tokens": len(every),
            "length_mean": fmean(len(tokens) for row in rows for tokens in row["out"]["tokens"]),
            **self._by_position(samples),
        }
        impossible = [f"{row['id']}.{number}" for row in rows for number in never(row["out"])]
        found |= {"gap_impossible": len(impossible), "gap_impossible_samples": impossible[:NAMED]}
        if "self" in rows[0]["out"]["rollouts"]:
            own = np.concatenate([one for row in rows for one in gaps_of(row["out"], "self")])
            found |= {"gap_self_kl": off_policy.kl(own), "gap_self_k3": off_policy.k3(own)}
        return found | self._rewarded(rows, sums) | self._costs(rows)

    def _by_position(self, samples: Sequence[np.ndarray]) -> dict[str, Any]:
        """Quantiles of Δ in each sixteenth of the output, None where no sample is that long."""
        bins: list[list[float]] = [[] for _ in range(POINTS)]
        for one in samples:
            for at, value in enumerate(one, 1):  # the first token has no gap and is not in `one`
                bins[min(POINTS - 1, at * POINTS // self.output)].append(float(value))
        curves = {
            f"curve_q{100 * q:g}": [float(np.quantile(values, q)) if values else None for values in bins]
            for q in QUANTILES
        }
        return {"curve_position": [(i + 0.5) * self.output / POINTS for i in range(POINTS)], **curves}

    def _rewarded(self, rows: Sequence[Mapping[str, Any]], sums: Sequence[np.ndarray]) -> dict[str, Any]:
        """Rewards of groups, weighted and not; nothing where there is no reward."""
        names = [f"reward_{number}" for number in range(self.n_samples)]
        if names[0] not in rows[0]["scores"]:
            return {}
        rewards = [[row["scores"][name] for name in names] for row in rows]
        powers = sorted({1, self.n_samples, *(2**i for i in range(1, self.n_samples.bit_length()))})
        found: dict[str, Any] = {
            "reward_mean": fmean(fmean(one) for one in rewards),
            "reward_is": fmean(off_policy.importance_reward(r, s) for r, s in zip(rewards, sums, strict=True)),
            "reward_signal": fmean(any(off_policy.advantages(one)) for one in rewards),
        }
        return found | {
            f"pass_at_{k}": fmean(off_policy.pass_at(k, one) for one in rewards) for k in powers if k <= self.n_samples
        }

    def _costs(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Diversity, bytes of groups, measured speed, and simulated schedules on the lengths that were sampled."""
        outs = [row["out"] for row in rows]
        texts = [[tuple(tokens) for tokens in out["tokens"]] for out in outs]
        lengths = [len(tokens) for out in outs for tokens in out["tokens"]]
        held = [out["rollouts"]["bytes"] for out in outs]
        found: dict[str, Any] = {
            "distinct": fmean(len(set(group)) / len(group) for group in texts),
            "entropy": fmean(value for out in outs for one in out["rollouts"]["entropy"] for value in one),
            "bytes_group": fmean(one["group"] for one in held),
            "bytes_unshared": fmean(one["unshared"] for one in held),
            "bytes_ratio": fmean(one["unshared"] / one["group"] for one in held),
        }
        walls = [out["rollouts"]["wall_s"] for out in outs]
        steps = [out["rollouts"]["step_s"] for out in outs if out["rollouts"]["step_s"] is not None]
        if steps and None not in walls and max(lengths) > 0:  # with others' steps nothing was timed
            found["tokens_per_s"] = sum(lengths) / sum(walls)
            slots, step = self.batch or self.n_samples, median(steps)
            static, continuous = (make(lengths, slots, step) for make in (static_makespan, continuous_makespan))
            found |= {"simulated_makespan_static_s": static, "simulated_makespan_continuous_s": continuous}
            for stale in self.stale:
                run = staleness(walls, self.workers, max(1, len(walls) // 2), self.train_s, self.sync_s, stale, 50)
                found |= {
                    f"simulated_stale{stale}_utilisation": run.utilisation,
                    f"simulated_stale{stale}_dropped": run.dropped,
                    f"simulated_stale{stale}_step_s": run.step_s,
                }
        return found


def _short(value: float) -> float | None:
    """A log-probability as a row keeps it; None stands for minus infinity, which JSON has no number for."""
    return None if value == -math.inf else float(f"{value:.{DIGITS}g}")


def gaps_of(out: Mapping[str, Any], scorer: str = "dense") -> list[np.ndarray]:
    """Δ of each sample's tokens after the first."""
    found = out["rollouts"]
    return [
        off_policy.deltas(mu[1:], [-math.inf if value is None else value for value in pi[1:]])[0]
        for mu, pi in zip(found["mu"], found[scorer], strict=True)
    ]


def never(out: Mapping[str, Any]) -> list[int]:
    """Numbers of the samples that hold a token to which the dense model gives no probability at all."""
    return [number for number, one in enumerate(out["rollouts"]["dense"]) if any(value is None for value in one)]
