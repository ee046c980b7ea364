"""Serving comparison: hits, goodput, and what happens at a load that the full cache can bear, per method and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvcompress.measure.serving import hits
from kvcompress.measure.serving.costs import MethodCosts
from kvcompress.measure.serving.requests import Request, scaled
from kvcompress.measure.serving.simulation import Outcome, Server, simulate
from kvcompress.measure.serving_simulation import highest_rate

SHARE = 0.9  # of all requests that must meet both targets
FALL = 0.8  # from rate to rate on the way down to the highest that is met
QUANTILES = tuple(range(0, 101, 2))  # of the distributions that figures draw
CURVE = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)  # times a memory, in hit curves


@dataclass(frozen=True)
class Targets:
    """Seconds to the first token, and of the longest tenth of gaps (TBT)."""

    ttft: float
    tbt: float

    @classmethod
    def of(cls, full: MethodCosts, requests: Sequence[Request], slack: float) -> Targets:
        """`slack` times what the full cache takes for a mean request by itself; a gap may also hold one such prompt.

        Mooncake's 30 s to the first token are about 25 times a mean prompt; traces come in bursts.
        """
        tokens = sum(one.input for one in requests) / len(requests)
        prompt = full.prefill_s(tokens)
        return cls(slack * prompt, slack * full.step_s(1, full.kept.at(tokens)) + prompt)


def memory_of(full: MethodCosts, requests: Sequence[Request], slots: int) -> float:
    """Bytes in which the longest request and `slots - 1` mean ones fit with the full cache."""
    need = [full.held.at(one.input, one.output) for one in requests]
    return max(need) * 1.01 + (slots - 1) * sum(need) / len(need)  # a block more than its tokens


def by_rate(requests: Sequence[Request], costs: MethodCosts, server: Server, targets: Targets, steps: int) -> float:
    """Goodput: the highest arrival rate, requests per second, at which 90% of all meet both targets.

    The trace's arrivals come faster or slower, bursts and all.
    """
    span = requests[-1].at - requests[0].at
    if not span > 0:
        raise ValueError("all requests of this trace arrive at once: it has no rate to be raised")
    own = len(requests) / span
    peak = len(requests) / simulate(scaled(requests, rate=1e6), costs, server).seconds
    factor = highest_rate(
        lambda rate: simulate(scaled(requests, rate=rate), costs, server).attained(targets.ttft, targets.tbt),
        1.5 * peak / own,
        SHARE,
        steps,
        FALL,
    )
    return factor * own


def figures(outcome: Outcome, targets: Targets) -> dict[str, Any]:
    """`Outcome.figures`, what met the targets, and quantiles of the first token's seconds."""
    met = outcome.attained(targets.ttft, targets.tbt)
    return outcome.figures() | {
        "attained": met,
        "goodput_per_s": met * len(outcome.jobs) / outcome.seconds,
        "ttft_quantiles": [float(value) for value in np.percentile(outcome.ttfts(), QUANTILES)],
    }


def extrapolation(outcome: Outcome, costs: MethodCosts) -> list[str]:
    """Quantities that went beyond what was measured."""
    longest = max(job.request.input for job in outcome.jobs)
    rows, kept = max(one.most_rows for one in outcome.instances), max(one.peak_kept for one in outcome.instances)
    return costs.extrapolated(longest, rows, kept)


def curve(
    requests: Sequence[Request], costs: MethodCosts, token_bytes: float, memory: float, policy: str
) -> dict[str, Any]:
    """Exact hit rates, without time, of a cache of several sizes; requests that run take none of it.

    Returns:
        `memory` in bytes, `hit` shares by token, `unlimited` of the best reuse there is.
    """
    rates, sizes = [], []
    if not any(one.blocks for one in requests) or policy == "none":
        return {"memory": [], "hit": [], "unlimited": None, "whole": None}
    size = max(one.block_size for one in requests)
    reuse = "prefix" if costs.store == "exact" else costs.reuse
    ratio = 1.0 if costs.store == "exact" else costs.held.per_prompt / token_bytes
    for factor in CURVE:
        blocks = int(factor * memory / (token_bytes * size))
        if blocks:
            sizes.append(factor * memory)
            rates.append(hits.replay(requests, blocks, policy, reuse, ratio).rate)
    best = hits.replay(requests, None)
    own = hits.replay(requests, None, reuse=reuse)
    return {"memory": sizes, "hit": rates, "unlimited": best.rate, "own": own.rate}


def compare(
    requests: Sequence[Request],
    sides: Mapping[str, MethodCosts],
    base: str,
    server: Server,
    targets: Targets,
    steps: int = 8,
    rate: float | None = None,
) -> dict[str, dict[str, Any]]:
    """Methods on one trace at one memory, each at its own goodput and all at the same load.

    Args:
        base: the side that others are compared with, the full cache.
        rate: that load, requests per second; None: what the full cache can bear, its goodput.
        steps: halvings of each goodput, between the highest rate that is met and the one above it.

    Returns:
        by name `goodput_rate`, its ratio to the base's, `at` (figures at the same load), `reuse`, `ratio`, `unlimited`
        hit rates of the trace, `share_of_unlimited` and `extrapolated`.
    """
    found: dict[str, dict[str, Any]] = {}
    names = [base, *(name for name in sides if name != base)]
    for name in names:
        found[name] = {"goodput_rate": by_rate(requests, sides[name], server, targets, steps)}
    load = rate or found[base]["goodput_rate"]
    if not load > 0:
        raise ValueError(
            f"the full cache meets its targets (TTFT {targets.ttft:.3g} s, TBT {targets.tbt:.3g} s) at no rate: longer targets "
            "(ttft, tbt, slack), more memory, or a rate of your own"
        )
    own = len(requests) / (requests[-1].at - requests[0].at)
    has_ids = any(one.blocks for one in requests) and server.policy != "none"
    unlimited = hits.replay(requests, None).rate if has_ids else None
    for name in names:
        costs, outcome = sides[name], simulate(scaled(requests, rate=load / own), sides[name], server)
        at = figures(outcome, targets)
        found[name] |= {
            "simulated": True,
            "reuse": costs.reuse,
            "store": costs.store,
            "ratio": costs.held.per_prompt / sides[base].token_bytes,
            "load": load,
            "at": at,
            "unlimited": unlimited,
            "share_of_unlimited": at["hit_rate"] / unlimited if unlimited else None,
            "extrapolated": extrapolation(outcome, costs),
            "to_base": found[name]["goodput_rate"] / found[base]["goodput_rate"]
            if found[base]["goodput_rate"]
            else None,
        }
    return found


def with_store(costs: MethodCosts, store: str) -> MethodCosts:
    """The same with what is kept for reuse as `store` says; codes and readers reuse what they hold."""
    return replace(costs, store=store) if costs.reuse == "whole" else costs
