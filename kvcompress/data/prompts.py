"""Prompts of published benchmarks as token ids: middle truncation, chat template, border of context and question."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcompress.common.tokenization import begun, plain_ids, prompt_ids, with_offsets
from kvcompress.data.thinking import start_answer

TEMPLATES = ("auto", "chat", "none")
MARGIN = 64  # positions left free beside prompt and answer where a limit follows from the model


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model sees it.

    Attributes:
        context: ids up to where the question begins; all of them where nothing is to be held back.
        question: ids from there on.
        template: "chat" or "none", as resolved.
        truncated: tokens that were cut out of the middle.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]
    template: str
    truncated: int

    @property
    def ids(self) -> tuple[int, ...]:
        return self.context + self.question


def resolve_template(tokenizer: Any, template: str) -> str:
    """ "chat" or "none"; "auto" is chat where the tokenizer has a template.

    Raises:
        ValueError: an unknown value, or "chat" and the tokenizer has none.
    """
    if template not in TEMPLATES:
        raise ValueError(f"template={template!r}; valid: {', '.join(TEMPLATES)}")
    has = bool(getattr(tokenizer, "chat_template", None))
    if template == "chat" and not has:
        raise ValueError("template=chat, but this tokenizer has no chat template; use template=auto or none")
    return "chat" if template != "none" and has else "none"


def cut_text(tokenizer: Any, text: str, limit: int, joined: bool = False) -> tuple[str, int]:
    """LongBench's rule: the decoded first and last `limit // 2` tokens, joined as text.

    What comes out is tokenised again, so that it may be a few tokens longer or shorter than `limit`.

    Args:
        joined: decode both halves as one, as InfiniteBench does; where bytes of a character or a space stand at the
            border, the text differs.

    Returns:
        the text, and the number of tokens cut out.
    """
    ids = prompt_ids(tokenizer, text)
    if len(ids) <= limit:
        return text, 0
    half = limit // 2
    if joined:
        return tokenizer.decode([*ids[:half], *ids[-half:]], skip_special_tokens=True), len(ids) - 2 * half
    first, last = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
    return first + last, len(ids) - 2 * half


def room(tokenizer: Any, answer: int, margin: int = MARGIN) -> int:
    """Tokens of a prompt at most, by what the tokenizer says the model takes, with an answer of so many beside it.

    Raises:
        ValueError: next to nothing is left.
    """
    takes = int(min(tokenizer.model_max_length, 1 << 20))
    left = takes - answer - margin
    if left < 16:
        raise ValueError(
            f"the tokenizer says that the model takes {takes} tokens; an answer of {answer} and {margin} to spare leave "
            f"{max(left, 0)} for the prompt, of at least 16: take another model, or set task.max_length"
        )
    return left


def cut_ids(ids: Sequence[int], limit: int) -> tuple[int, ...]:
    """The first `limit // 2` and the last `limit - limit // 2` ids: exactly `limit` where there are more."""
    if len(ids) <= limit:
        return tuple(ids)
    half = limit // 2
    return (*ids[:half], *ids[len(ids) - (limit - half) :])


def build(
    tokenizer: Any,
    text: str,
    tail: str,
    template: str,
    limit: int | None,
    truncation: str,
    hide: bool,
    answer: str = "",
) -> Prompt:
    """Cut, wrap and tokenise a prompt, and part it where `tail` (the question and what follows) begins.

    Args:
        text: the prompt before any wrapper; it ends with `tail`.
        template: as `resolve_template` takes it.
        limit: at most this many tokens, or None. With truncation "text" before the wrapper, as published; with
            "tokens" all of them, exactly.
        answer: start of the answer, after the wrapper; the model continues it.
        hide: part the prompt at the tail. The ids are the same; a token that spans the border goes to the question.

    Raises:
        ValueError: hide=True and the tail itself was cut.
    """
    kind = resolve_template(tokenizer, template)
    cut = 0
    if limit is not None and truncation == "text":
        text, cut = cut_text(tokenizer, text, limit)
    if kind == "chat":
        chat = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        text = start_answer(tokenizer, text, answer)
    else:
        text += answer
    offsets: list[tuple[int, int]] = []
    if hide:
        plain, offsets = with_offsets(tokenizer, text)
    else:
        plain = plain_ids(tokenizer, text)
    ids = plain if kind == "chat" else begun(tokenizer, plain)
    border = len(ids)
    if hide:
        at = text.rfind(tail.strip())
        if at < 0:
            raise ValueError(f"question=hidden, but the question was cut: raise max_length above {limit}")
        # a token without a place in the text has an empty offset
        border = next(i for i, (start, end) in enumerate(offsets) if end > at and end > start) + len(ids) - len(plain)
    if limit is not None and truncation == "tokens" and len(ids) > limit:
        question = len(ids) - border
        if hide and question > limit - limit // 2:
            raise ValueError(f"question=hidden, but the question alone takes {question} tokens: raise max_length")
        cut = len(ids) - limit
        ids, border = list(cut_ids(ids, limit)), limit - question
    return Prompt(tuple(ids[:border]), tuple(ids[border:]), kind, cut)


def digest(ids: Sequence[int]) -> str:
    """16 hex digits that change with any id."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


def facts(tokenizer: Any, ids: Sequence[int], truncated: int = 0) -> dict[str, Any]:
    """What a record keeps of a prompt: length, tokens cut out, hash, and its first and last 200 characters."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return {
        "prompt_tokens": len(ids),
        "truncated_tokens": truncated,
        "prompt_hash": digest(ids),
        "prompt_first": text[:200],
        "prompt_last": text[-200:],
    }


def describe(tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
    """`facts` of a built prompt."""
    return facts(tokenizer, prompt.ids, prompt.truncated)
