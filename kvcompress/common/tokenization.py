"""Text to token ids: special tokens only where a prompt begins.

A tokenizer may put special tokens before a text (a BOS token) and after it (`add_eos_token=true`, or a post-processor
that ends each text). What comes after would end the prompt before the model answers, so every prompt is made here: the
tokenizer's own prefix, then the text's ids, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text without any added special token.

    Raises:
        ValueError: the text holds half of a surrogate pair, which no tokenizer can encode.
    """
    return list(_checked(text, lambda: tokenizer.encode(text, add_special_tokens=False)))


def with_offsets(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a text without any added special token, and where each stands in it: `(start, end)` in characters.

    Raises:
        ValueError: as `plain_ids`.
    """
    found = _checked(text, lambda: tokenizer(text, add_special_tokens=False, return_offsets_mapping=True))
    return list(found["input_ids"]), [tuple(pair) for pair in found["offset_mapping"]]


def prefix_ids(tokenizer: Any) -> tuple[int, ...]:
    """The special tokens that a tokenizer puts before a text: empty, or as a rule its BOS token."""
    marked, plain = list(tokenizer.encode("a", add_special_tokens=True)), plain_ids(tokenizer, "a")
    for at in range(len(marked) - len(plain) + 1):
        if marked[at : at + len(plain)] == plain:
            return tuple(marked[:at])
    special = set(tokenizer.all_special_ids)
    first_plain = next((at for at, token in enumerate(marked) if token not in special), 0)
    return tuple(marked[:first_plain])


def begun(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Ids of a text as a prompt: behind the tokenizer's prefix, unless the text begins with it already."""
    first = prefix_ids(tokenizer)
    return list(ids) if tuple(ids[: len(first)]) == first else [*first, *ids]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text as a prompt: the tokenizer's prefix, then the text; nothing is added at its end.

    Raises:
        ValueError: as `plain_ids`.
    """
    return begun(tokenizer, plain_ids(tokenizer, text))


def surrogate(text: str) -> int | None:
    """Where a text holds half of a surrogate pair (JSON's `\\ud83d` alone), or None: such a text is no Unicode."""
    return next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)


def _checked(text: str, encode: Callable[[], Any]) -> Any:
    try:
        return encode()
    except (TypeError, UnicodeEncodeError) as error:
        at = surrogate(text)
        if at is None:
            raise
        raise ValueError(
            f"the text holds half of a surrogate pair (\\u{ord(text[at]):04x} at character {at + 1}), which cannot be "
            "tokenised: write the whole character, or leave it out"
        ) from error
