"""Tokenisation of lm-eval's requests, as its HFLM does it, without a model. Needs the extra `eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcompress.common.tokenization import plain_ids, prompt_ids
from kvcompress.data.lm_eval_requests import Completion, Continuation
from kvcompress.data.thinking import begins_thinking

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
except ImportError as error:
    raise ImportError(f"lm-eval cannot be imported ({error}): pip install 'kvcompress[eval]'") from error

MAX_GEN_TOKS = 256  # where a task does not say, as in lm-eval's HFLM
SAMPLING = {"do_sample", "temperature", "top_p", "top_k"}


class Encoding:
    """Text to ids as lm-eval's HFLM does it: special tokens, the border of context and continuation, cuts on the left.

    Args:
        max_length: positions of the model; longer requests lose tokens on the left. None: nothing is cut.
    """

    backend = "causal"

    def __init__(self, tokenizer: Any, max_length: int | None = None) -> None:
        self.tokenizer, self.limit = tokenizer, max_length

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        first = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if first is None else first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a string; by default behind the tokenizer's prefix, unless it begins with one already. None ends it."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        return prompt_ids(self.tokenizer, string) if add_special_tokens else plain_ids(self.tokenizer, string)

    _encode_pair = TemplateLM._encode_pair

    def pair(self, context: str, continuation: str) -> Continuation:
        """A continuation after a context, which may be empty.

        Raises:
            ValueError: the continuation has no token, or more than the model takes.
        """
        if context == "":
            head, tail = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
            if tail[:1] == head:
                head, tail = tail[:1], tail[1:]
        else:
            head, tail = self._encode_pair(context, continuation)
        return self._cut(head or [self.prefix_token_id], tail, repr(continuation))

    def _cut(self, head: Sequence[int], tail: Sequence[int], what: str) -> Continuation:
        if not tail:
            raise ValueError(f"the continuation {what} adds no token to its context")
        over = 0 if self.limit is None else max(0, len(head) + len(tail) - (self.limit + 1))
        if over >= len(head):
            raise ValueError(f"the continuation {what[:80]} has {len(tail)} tokens, the model takes {self.limit}")
        return Continuation(tuple(head[over:]), tuple(tail), over)

    def windows(self, text: str) -> list[Continuation]:
        """A text of any length as continuations that predict each of its tokens once.

        Raises:
            ValueError: no length of a window is known.
        """
        if self.limit is None:
            raise ValueError("a text is scored in windows of the model's length, which is not known: set max_length")
        windows = utils.get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.limit, 1)
        parts = (utils.make_disjoint_window(window) for window in windows)
        return [self._cut(head, tail, "of a window") for head, tail in parts]

    def completion(self, context: str, settings: Mapping[str, Any]) -> Completion:
        """A text to go on with, under a task's `generation_kwargs`.

        Raises:
            ValueError: settings that are not available here, or an answer as long as the model takes.
        """
        kwargs = dict(normalize_gen_kwargs(dict(settings), MAX_GEN_TOKS))
        until, length = kwargs.pop("until"), int(kwargs.pop("max_gen_toks"))
        other = {
            key: value for key, value in kwargs.items() if key not in SAMPLING and (key, value) != ("num_beams", 1)
        }
        if other:
            raise ValueError(
                f"generation_kwargs {other} are not available; those that are: until, max_gen_toks, {', '.join(sorted(SAMPLING))}"
            )
        special = not has_bos_prefix(context, self.tokenizer.bos_token)
        ids = self.tok_encode(context, add_special_tokens=special) or [self.prefix_token_id]
        room = len(ids) if self.limit is None else self.limit - length
        if room < 1:
            raise ValueError(f"max_gen_toks={length} leaves no room for a prompt: the model takes {self.limit} tokens")
        return Completion(
            tuple(ids[-room:]),
            length,
            tuple(until),
            float(kwargs.get("temperature") or 0.0),
            float(kwargs.get("top_p") or 1.0),
            int(kwargs.get("top_k") or 0),
            max(0, len(ids) - room),
            begins_thinking(self.tokenizer, context),
        )

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as the text a model was trained on; without the system's where the template refuses it."""
        from jinja2.exceptions import TemplateError

        def applied(messages: list[dict[str, str]]) -> str:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        try:
            return applied(chat_history)
        except TemplateError:
            return applied([message for message in chat_history if message["role"] != "system"])
