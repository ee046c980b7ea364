"""lm-eval on a compressed model: a model class for its `simple_evaluate`, and how it turns text into token ids.

    import lm_eval
    from kvcompress.lm_eval import CompressedLM
    lm = CompressedLM(model, SnapKV(budget=0.25), tokenizer=tokenizer)
    lm_eval.simple_evaluate(lm, tasks=["hellaswag"])

With `method=None` the numbers are those of lm-eval's own HFLM. Needs the extra `eval`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.data.lm_eval_requests import (
    Completion,
    Continuation,
    check_rolling,
    complete,
    cut,
    draw_seed,
    log_likelihoods,
)
from kvcompress.hook.auxiliary import tokenizer_of
from kvcompress.hook.session import compress
from kvcompress.method import Method
from kvcompress.methods import METHODS
from kvcompress.models import loading

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, resolve_max_length
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
        """Ids of a string; by default with the tokenizer's special tokens, unless it begins with one already."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

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
        ids = list(self.tokenizer.encode(context, add_special_tokens=special)) or [self.prefix_token_id]
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


@register_model("kvcompress")
class CompressedLM(Encoding, TemplateLM):
    """A model for lm-eval whose KV cache a method compresses.

    Args:
        pretrained: a loaded model, or what `kvcompress.load` takes.
        method: a method, or its name in lower case with `budget` and its settings as further arguments; None: full.
        tokenizer: by default the one that `load` gave with the model.
        held_back: last tokens of a context that are fed after its compression, where a continuation is scored.
        max_length: longest sequence; by default what the model's configuration says.
        seed: of tasks that sample.
        batch_size, max_batch_size: taken and not used: requests run one by one.
    """

    def __init__(
        self,
        pretrained: PreTrainedModel | str,
        method: Method | str | None = None,
        tokenizer: Any = None,
        *,
        budget: float | int | None = None,
        kernel: str = "auto",
        held_back: int = 1,
        max_length: int | None = None,
        seed: int = 0,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: Any = None,
        max_batch_size: Any = None,
        **settings: Any,
    ) -> None:
        """Raises:
        ValueError: an unknown method or setting, before a model is loaded.
        """
        TemplateLM.__init__(self)
        self.method = _method(method, budget, settings)
        if held_back < 0:
            raise ValueError(f"held_back={held_back}; at least 0 tokens")
        if isinstance(pretrained, str):
            pretrained, loaded = loading.load(pretrained, dtype, device)
            tokenizer = tokenizer or loaded
        tokenizer = tokenizer or tokenizer_of(pretrained)
        if tokenizer is None:
            raise ValueError("this model did not come from kvcompress.load: give its tokenizer too")
        Encoding.__init__(self, tokenizer, max_length or resolve_max_length(pretrained.config, tokenizer))
        self.model, self.kernel, self.held_back, self.seed = pretrained, kernel, held_back, seed
        self.stop = loading.eos_ids(pretrained, tokenizer)
        self._device = pretrained.device
        self._seen: list[tuple[bool, float]] = []

    @property
    def max_length(self) -> int:
        assert self.limit is not None
        return self.limit

    @property
    def max_gen_toks(self) -> int:
        return MAX_GEN_TOKS

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval's results say of the model: the method and what it did."""
        return {"method": self.method.describe(), **self.summary()}

    def summary(self) -> dict[str, Any]:
        """Contexts prefilled so far, the share that lost no token, and bytes held over those of a full cache."""
        if not self._seen:
            return {"contexts": 0}
        return {
            "contexts": len(self._seen),
            "share_inactive": fmean(not active for active, _ in self._seen),
            "kv.ratio": fmean(ratio for _, ratio in self._seen),
        }

    # ------------------------------------------------------------------ what lm-eval calls

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation and whether it is the greedy one."""
        found = self._scored([self.pair(*request.args) for request in requests])
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return found

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        return self._scored([self._cut(head, tail, str(text)) for text, head, tail in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts.

        Raises:
            ValueError: the method would never act.
        """
        check_rolling(self.method)
        found = []
        for request in requests:
            found.append(sum(value for value, _ in self._scored(self.windows(*request.args))))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that go on until a stop string, which is not part of them."""
        found = []
        for number, request in enumerate(requests):
            asked = self.completion(*request.args)
            with compress(self.model, self.method, self.kernel, self.tokenizer) as session:
                session.prefill(torch.tensor([asked.context], device=self.model.device))
                self._note(session)
                seed = draw_seed(self.seed, number, *asked.context)
                tokens = complete(session, asked, self.stop, self.tokenizer, seed).tokens[0]
            found.append(cut(self.tokenizer.decode(tokens, skip_special_tokens=True), asked.until))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def _scored(self, asked: Sequence[Continuation]) -> list[tuple[float, bool]]:
        with compress(self.model, self.method, self.kernel, self.tokenizer) as session:
            return log_likelihoods(session, asked, self.held_back, lambda: self._note(session))

    def _note(self, session: Any) -> None:
        report = session.report()
        self._seen.append((report["active"], report["kv"]["ratio"]))


def _method(method: Method | str | None, budget: float | int | None, settings: dict[str, Any]) -> Method:
    names = {name.lower(): cls for name, cls in METHODS.items()}
    if isinstance(method, Method):
        if budget is not None or settings:
            given = ", ".join((["budget"] if budget is not None else []) + list(settings))
            raise ValueError(f"{given}: settings of the method, which is given as {method}")
        return method
    if method is None and settings:
        raise ValueError(f"{', '.join(settings)}: no argument of this model; settings of a method need method=NAME")
    if method is not None and method not in names:
        raise ValueError(f"method={method!r} is unknown; valid: {', '.join(sorted(names))}")
    cls = Method if method is None else names[method]
    settings = settings if budget is None else {"budget": budget, **settings}
    try:
        return cls(**settings)
    except TypeError as error:
        raise ValueError(f"method={method}: {error}") from None
