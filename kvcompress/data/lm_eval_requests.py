"""lm-eval's requests (log-likelihoods and completions) on a compressed cache.

How likely a continuation is, is found in two phases: the context is a prompt, which is compressed when it ends; then
the continuation is fed token by token as if it had been decoded, through what is left of the cache. The last tokens of
the context are held back from the prompt and fed after it: without that the first token of a continuation would be
predicted from the uncompressed cache, and an answer of one letter would never see the compression.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompress.common.tokenization import plain_ids
from kvcompress.data.thinking import LOOK_BACK, Output, ThoughtTracker, answer_part, decode
from kvcompress.hook.generation import Generation, Guide
from kvcompress.hook.session import Session
from kvcompress.method import Method


@dataclass(frozen=True)
class Continuation:
    """How likely is `continuation` after `context`? Ids, at least one of each; `truncated` were cut off the left."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    truncated: int = 0

    def total_tokens(self) -> int:
        """Positions it needs: the last token of the continuation is predicted, not fed."""
        return len(self.context) + len(self.continuation) - 1


@dataclass(frozen=True)
class Completion:
    """What comes after `context`, until one of the strings in `until`? Greedy at temperature 0.

    `thinking`: the context ends inside a thinking part. In one no string of `until` counts.
    """

    context: tuple[int, ...]
    max_new_tokens: int
    until: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    truncated: int = 0
    thinking: bool = False

    def total_tokens(self) -> int:
        """Positions it needs at most."""
        return len(self.context) + self.max_new_tokens


def prompt_of(asked: Continuation | Completion, held_back: int) -> tuple[int, ...]:
    """The part of the context that is compressed, at least one token."""
    if isinstance(asked, Completion):
        return asked.context
    return asked.context[: max(1, len(asked.context) - held_back)]


def check_rolling(method: Method) -> None:
    """Refuse methods that a text scored from its first token says nothing about.

    Raises:
        ValueError: names the method, and what would act.
    """
    if not method.limited:
        return
    name = type(method).__name__
    if not method.parts().schedule.in_decode:
        raise ValueError(
            f"loglikelihood_rolling scores a text after a prompt of one token, and {name} compresses when a prompt ends: "
            "nothing would ever be dropped. Give it a decode schedule (schedule=interval), or use task=fidelity"
        )
    if isinstance(method.budget, float):
        raise ValueError(
            f"loglikelihood_rolling scores a text after a prompt of one token, of which budget={method.budget} is a "
            "share: give a budget in tokens (an int)"
        )


@torch.no_grad()
def log_likelihoods(
    session: Session,
    asked: Sequence[Continuation],
    held_back: int = 1,
    compressed: Callable[[], None] = lambda: None,
    ended: Callable[[], None] = lambda: None,
) -> list[tuple[float, bool]]:
    """Log-probability in nats of each continuation, and whether greedy decoding would have written it.

    A context is prefilled once for all its continuations; each continues a copy of that cache.

    Args:
        held_back: last tokens of a context that are fed after its compression. Of a context no longer than that, all
            but the first token.
        compressed: called after each prefill; `ended`: after each continuation.
    """
    found: list[tuple[float, bool]] = [(0.0, False)] * len(asked)
    device = session.model.device
    contexts: dict[tuple[int, ...], list[int]] = {}
    for number, one in enumerate(asked):
        contexts.setdefault(one.context, []).append(number)
    for context, numbers in contexts.items():
        prompt = prompt_of(asked[numbers[0]], held_back)
        held = context[len(prompt) :]
        base = session.prefill(torch.tensor([prompt], device=device)).cache
        compressed()
        # the last token is predicted and not fed: continuations that differ in it alone are one run
        runs: dict[tuple[int, ...], list[int]] = {}
        for number in numbers:
            runs.setdefault(asked[number].continuation[:-1], []).append(number)
        for left, members in zip(range(len(runs) - 1, -1, -1), runs.values(), strict=True):
            session.cache = base.fork() if left else base
            ids = [*held, *asked[members[0]].continuation]
            targets = torch.tensor([asked[number].continuation for number in members], device=device)
            sums, greedy = _score(session, torch.tensor([ids], device=device), targets)
            for number, value, same in zip(members, sums.tolist(), greedy.tolist(), strict=True):
                found[number] = (value, same)
            ended()
    return found


def _score(session: Session, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Feed `ids [1, n]` → sums `[m]` of log-probabilities of the last tokens `targets [m, k]`, and which are greedy."""
    sums = torch.zeros(len(targets), dtype=torch.float64, device=targets.device)
    greedy = torch.ones(len(targets), dtype=torch.bool, device=targets.device)
    at = targets.shape[1] - ids.shape[1]  # below 0 where what is predicted was held back
    for block in session.follow(ids):  # a few tokens at a time: all logits of a long text need not fit
        rows = block[0, max(0, -at) :].to(targets.device).float().log_softmax(-1)
        at += block.shape[1]
        if len(rows):
            wanted = targets[:, at - len(rows) : at]
            sums += rows[torch.arange(len(rows), device=rows.device), wanted].double().sum(1)
            greedy &= (wanted == rows.argmax(-1)).all(1)
    return sums, greedy


@torch.no_grad()
def complete(
    session: Session,
    asked: Completion,
    stop: Sequence[int],
    tokenizer: Any,
    seed: int = 0,
    guides: Sequence[Guide | None] = (),
    max_new_tokens: int | None = None,
) -> Generation:
    """Continue the current cache, which ends with the context, until a stop token or string.

    Args:
        guides: rules of its thinking part; `max_new_tokens`: with that part, where it has a budget of its own.
    """
    return session.generate(
        max_new_tokens or asked.max_new_tokens,
        stop=stop,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=seed,
        until=reaches(asked.until, tokenizer, asked.thinking),
        guides=guides,
    )


def reaches(until: Sequence[str], tokenizer: Any, thinking: bool = False) -> Callable[[list[int]], bool] | None:
    """Whether the last tokens' text holds a stop string; None where there is none to look for."""
    spans = [(text, len(plain_ids(tokenizer, text)) + LOOK_BACK) for text in until if text]
    return StopStrings(spans, tokenizer, thinking) if spans else None


class StopStrings:
    """Looks for stop strings in an output that grows token by token, outside of its thinking parts.

    Blank space between the end of a thinking part and the answer is part of neither.

    Args:
        spans: each string, and the number of last tokens that it is looked for in.
        thinking: the output begins inside a thinking part.
    """

    def __init__(self, spans: Sequence[tuple[str, int]], tokenizer: Any, thinking: bool = False) -> None:
        self.spans, self.tokenizer = spans, tokenizer
        self._thought = ThoughtTracker(tokenizer, thinking)

    def __call__(self, tokens: list[int]) -> bool:
        """True if the output has come to a stop string; `tokens` are all so far, one more than at the last call."""
        if self._thought(tokens):
            return False
        return any(text in self._last(tokens, width) for text, width in self.spans)

    def _last(self, tokens: list[int], width: int) -> str:
        answer = tokens[self._thought.answer :]
        if self._thought.mark is None or len(answer) > width:
            return self.tokenizer.decode(answer[-width:])
        # a token may hold the end of the mark and the beginning of what follows it
        return answer_part(decode(self.tokenizer, tokens[self._thought.mark :])).lstrip()


def answer_text(asked: Completion, tokens: Sequence[int], tokenizer: Any) -> str:
    """What is scored of an output: the text behind any thinking part and before the first stop string."""
    output = Output(decode(tokenizer, tokens), asked.thinking)
    thought = asked.thinking or output.answer != output.text
    return cut(output.answer.lstrip() if thought else output.text, asked.until)


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first stop string."""
    for stop in until:
        if stop:
            text = text.split(stop)[0]
    return text


def draw_seed(*parts: Any) -> int:
    """A seed for sampling that follows from what is asked."""
    return int.from_bytes(hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:7])
