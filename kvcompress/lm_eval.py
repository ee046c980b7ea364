"""lm-eval's model class for compressed models, for its `simple_evaluate`.

    import lm_eval
    from kvcompress.lm_eval import CompressedLM
    lm = CompressedLM(model, SnapKV(budget=0.25), tokenizer=tokenizer)
    lm_eval.simple_evaluate(lm, tasks=["hellaswag"])

With `method=None` the numbers are those of lm-eval's own HFLM. Needs the extra `eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.data.lm_eval_encoding import MAX_GEN_TOKS, Encoding
from kvcompress.data.lm_eval_requests import (
    Continuation,
    answer_text,
    check_rolling,
    complete,
    draw_seed,
    log_likelihoods,
)
from kvcompress.data.think_rules import without_thinking
from kvcompress.data.thinking import CLOSING
from kvcompress.hook.session import compress
from kvcompress.method import Method
from kvcompress.methods import method_of
from kvcompress.models import loading
from kvcompress.models.tokenizers import tokenizer_of

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import resolve_max_length
except ImportError as error:
    raise ImportError(f"lm-eval cannot be imported ({error}): pip install 'kvcompress[eval]'") from error


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
        think_end_token: mark that ends a thinking part, as text or as the id of a token. Not needed: a text that thinks is
            known by its marks, and what is scored of it is what stands behind them; stop strings do not count before.
        enable_thinking: False switches thinking off in the chat template (`think=off`); True and None leave it as it is.
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
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **settings: Any,
    ) -> None:
        """Raises:
        ValueError: an unknown method or setting, before a model is loaded.
        """
        TemplateLM.__init__(self)
        self.method = method_of(method, budget, settings)
        if isinstance(think_end_token, str) and think_end_token.isdigit():  # as lm-eval reads it from a command line
            think_end_token = int(think_end_token)
        if not isinstance(think_end_token, int) and think_end_token not in (None, *CLOSING):
            raise ValueError(f"think_end_token={think_end_token!r}; valid: {', '.join(CLOSING)}, or a token's id")
        if held_back < 0:
            raise ValueError(f"held_back={held_back}; at least 0 tokens")
        if isinstance(pretrained, str):
            pretrained, loaded = loading.load(pretrained, dtype, device)
            tokenizer = tokenizer or loaded
        tokenizer = tokenizer or tokenizer_of(pretrained)
        if tokenizer is None:
            raise ValueError("this model did not come from kvcompress.load: give its tokenizer too")
        if isinstance(think_end_token, int) and (mark := tokenizer.decode([think_end_token]).strip()) not in CLOSING:
            raise ValueError(f"think_end_token={think_end_token} is {mark!r}; valid: ids of {', '.join(CLOSING)}")
        if enable_thinking is False:
            tokenizer = without_thinking(tokenizer)
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
        """Texts that go on until a stop string, which is not part of them; nor is a thinking part before them."""
        found = []
        for number, request in enumerate(requests):
            asked = self.completion(*request.args)
            with compress(self.model, self.method, self.kernel, self.tokenizer) as session:
                session.prefill(torch.tensor([asked.context], device=self.model.device))
                self._note(session)
                seed = draw_seed(self.seed, number, *asked.context)
                tokens = complete(session, asked, self.stop, self.tokenizer, seed).tokens[0]
            found.append(answer_text(asked, tokens, self.tokenizer))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def _scored(self, asked: Sequence[Continuation]) -> list[tuple[float, bool]]:
        with compress(self.model, self.method, self.kernel, self.tokenizer) as session:
            return log_likelihoods(session, asked, self.held_back, lambda: self._note(session))

    def _note(self, session: Any) -> None:
        report = session.report()
        self._seen.append((report["active"], report["kv"]["ratio"]))
