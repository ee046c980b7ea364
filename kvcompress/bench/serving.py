"""Costs of methods for the serving simulation, and the simulation beside really measured batches.

A real batch: its prompts one by one as they would be admitted, each timed to its first token, then decode steps of all
of them as rows of one padded batch. The simulation is told nothing of that batch: it is fed with fits of other lengths
and numbers of rows, measured in the same round, so that a slow spell of the machine falls on both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from kvcompress.common.memory import release
from kvcompress.hook.session import compress
from kvcompress.measure.latency import prompt_ids
from kvcompress.measure.measuring import quartiles, synchronize, timed
from kvcompress.measure.serving import measured_costs
from kvcompress.measure.serving.costs import MethodCosts
from kvcompress.measure.serving.requests import Request
from kvcompress.measure.serving.simulation import Server, simulate
from kvcompress.measure.timing import Laps
from kvcompress.method import Method

THROUGHPUT, FIRST_TOKEN = 0.15, 0.20  # how far the simulation may be off
PLENTY = 1e15  # bytes: memory limits nothing here


def costs_of(method: Method, found: Sequence[measured_costs.Points], model: Any) -> MethodCosts:
    """A method's costs; one that reuses chunks keeps them as the model made them."""
    store = "exact" if method.parts().prefill.needs_segments else "compressed"
    return measured_costs.costs(
        measured_costs.label(method), method.cache_reuse, found, model.config.get_text_config().num_hidden_layers, store
    )


def measure(
    model: Any, tokenizer: Any, methods: Mapping[str, Method], plan: measured_costs.Plan, seed: int = 0
) -> Iterator[Measured]:
    """Costs of each method, one after another; rounds of a method are not shared with others."""
    ids = prompt_ids(tokenizer, max(plan.lengths), "random", seed)
    for method in methods.values():
        found = []
        for number in range(-plan.warmup, plan.rounds):
            with compress(model, method, "auto", tokenizer) as session:
                points = measured_costs.points(session, ids, plan)
            found += [points] if number >= 0 else []
        yield Measured(costs_of(method, found, model), measured_costs.medians(found))


@dataclass(frozen=True)
class Measured:
    """A method's costs and the medians over rounds that they were fitted through."""

    costs: MethodCosts
    points: Mapping[str, Sequence[Sequence[float]]]

    def as_dict(self) -> dict[str, Any]:
        return self.costs.as_dict() | {"points": self.points}


@dataclass(frozen=True)
class Agreement:
    """The simulation over what was measured, medians over rounds with quartiles.

    Attributes:
        lengths: of the prompts; output: tokens of each answer.
        throughput, first_token: simulated over real, tokens per second and median seconds to the first token.
    """

    method: str
    lengths: tuple[int, ...]
    output: int
    throughput: float
    throughput_quartiles: tuple[float, float]
    first_token: float
    first_token_quartiles: tuple[float, float]
    real_tokens_per_s: float
    real_first_token_s: float
    rounds: int

    @property
    def missed(self) -> bool:
        """True if the simulation is farther off than it may be."""
        return abs(self.throughput - 1) > THROUGHPUT or abs(self.first_token - 1) > FIRST_TOKEN

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"missed": self.missed}


def mixed(plan: measured_costs.Plan, batch: int, seed: int) -> tuple[int, ...]:
    """Lengths between the shortest and the longest measured one, of which none is itself measured."""
    rng, low, high = random.Random(f"mixed:{seed}:{batch}"), min(plan.lengths), max(plan.lengths)
    pool = [length for length in range(low + 1, high) if length not in plan.lengths]
    return tuple(rng.sample(pool, batch))


@torch.no_grad()
def real(session: Any, ids: Sequence[int], lengths: Sequence[int], output: int) -> tuple[float, list[float]]:
    """Tokens per second, and seconds to each request's first token, of a batch in an open session."""
    device, firsts, passed = session.model.device, [], 0.0
    prompts = [torch.tensor([ids[:length]], device=device) for length in lengths]
    session.cache = None
    synchronize(device)
    for prompt in prompts:
        _, seconds = timed(lambda prompt=prompt: session.prefill(prompt).logits.argmax(-1), device)  # type: ignore[misc]
        passed += seconds
        firsts.append(passed)
        session.cache = None
    longest = max(lengths)
    padded = torch.zeros(len(lengths), longest, dtype=torch.long, device=device)
    mask = torch.zeros_like(padded)
    for row, prompt in enumerate(prompts):
        padded[row, longest - prompt.shape[1] :], mask[row, longest - prompt.shape[1] :] = prompt[0], 1
    token = session.prefill(padded, attention_mask=mask).logits.argmax(-1)
    laps = Laps(device)
    laps.lap()
    for _ in range(output - 1):
        token = session.step(token[:, None]).argmax(-1)
        laps.lap()
    session.cache = None
    release()
    return len(lengths) * output / (passed + sum(laps.seconds())), firsts


def simulated(costs: MethodCosts, lengths: Sequence[int], output: int) -> tuple[float, list[float]]:
    """The same of the simulation, all requests there from the beginning."""
    outcome = simulate([Request(0.0, length, output) for length in lengths], costs, Server(PLENTY, policy="none"))
    return len(lengths) * output / outcome.seconds, outcome.ttfts()


def check(
    model: Any,
    tokenizer: Any,
    methods: Mapping[str, Method],
    plan: measured_costs.Plan,
    batches: Sequence[int] = (2, 4, 6),
    output: int = 32,
    seed: int = 0,
    progress: Callable[[], None] | None = None,
) -> Iterator[Agreement]:
    """Each method's batches, measured and simulated in each round."""
    if not batches or min(batches) < 1 or output < 2:
        raise ValueError(f"batches={list(batches)}, output={output}: one or more from 1, and at least 2 tokens")
    ids = prompt_ids(tokenizer, max(plan.lengths), "random", seed)
    sizes = {batch: mixed(plan, batch, seed) for batch in batches}
    for name, method in methods.items():
        ratios: dict[int, list[tuple[float, float, float, float]]] = {batch: [] for batch in batches}
        for number in range(-plan.warmup, plan.rounds):
            with compress(model, method, "auto", tokenizer) as session:
                points = measured_costs.points(session, ids, plan)
                there = {batch: real(session, ids, lengths, output) for batch, lengths in sizes.items()}
            if progress is not None:
                progress()
            if number < 0:
                continue
            costs = costs_of(method, [points], model)
            for batch, lengths in sizes.items():
                (rate, firsts), (said, first) = there[batch], simulated(costs, lengths, output)
                ratios[batch].append((said / rate, median(first) / median(firsts), rate, median(firsts)))
        for batch, lengths in sizes.items():
            throughput, first, rates, seconds = (list(column) for column in zip(*ratios[batch], strict=True))
            yield Agreement(
                name, lengths, output, median(throughput), quartiles(throughput), median(first), quartiles(first),
                median(rates), median(seconds), plan.rounds,
            )  # fmt: skip
