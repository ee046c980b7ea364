"""Pipeline of transformers for questions on a context whose KV cache is compressed.

    import kvcompress  # registers it
    from transformers import pipeline

    pipe = pipeline("kv-compressed-text-generation", model="Qwen/Qwen3-0.6B")
    pipe(context, question="Which gate?", method=SnapKV(budget=0.25))["answer"]
    pipe(context, questions=["Which gate?", "Whose?"], method="snapkv", budget=0.25)["answers"]

Arguments and results have the names of kvpress's pipeline (`question`, `questions`, `answer_prefix`, `max_new_tokens`,
`max_context_length`; `answer`, `answers`), with `method` for its `press`. The context is compressed once, before any
question is known; each question is asked of it alone, greedily.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

if TYPE_CHECKING:
    from kvcompress.method import Method

TASK = "kv-compressed-text-generation"
MAX_NEW_TOKENS = 50  # as in kvpress
THINK = ("off", "keep")


def register() -> None:
    """Make `TASK` known to `transformers.pipeline`."""
    PIPELINE_REGISTRY.register_pipeline(
        TASK, pipeline_class=CompressedTextGenerationPipeline, pt_model=AutoModelForCausalLM
    )


class CompressedTextGenerationPipeline(Pipeline):
    """Answers to questions on a context.

    Call with a context (or a list of them) and

        question, questions: text, or a list of texts; without either the model goes on from the context.
        method: a method, or its name in lower case with `budget` and its settings; None compresses nothing.
        answer_prefix: start of each answer, which is no part of what is returned.
        max_new_tokens: of each answer, 50 unless told otherwise.
        max_context_length: tokens of a context at most; what is behind is cut off, with a warning.
        think: "off" (where the chat template can switch thinking off, as kvpress does) or "keep": the answer is then what
            stands behind the thinking part, "" where `max_new_tokens` cuts it off.

    The same arguments may be given to `transformers.pipeline`, for all calls. A call returns `{"answer": text}` for one
    question and `{"answers": [text, …]}` for `questions`.
    """

    _load_tokenizer: Any = True
    _load_processor: Any = False
    _load_image_processor: Any = False
    _load_video_processor: Any = False
    _load_feature_extractor: Any = False

    def _sanitize_parameters(
        self,
        question: str | None = None,
        questions: Sequence[str] | None = None,
        answer_prefix: str | None = None,
        method: Method | str | None = None,
        budget: float | int | None = None,
        max_new_tokens: int | None = None,
        max_context_length: int | None = None,
        think: str | None = None,
        **settings: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Arguments of a call as those of its three steps; those that are not given keep what they were.

        Raises:
            ValueError: an argument of another kind or value than is allowed, by name.
        """
        from kvcompress.methods import method_of

        if budget is not None and method is None:
            raise ValueError(f"budget={budget} is given without a method: name one, such as method='snapkv'")
        if "press" in settings:
            raise ValueError("press: methods go by the name of method here, such as method=SnapKV(budget=0.25)")
        if question is not None and questions is not None:
            raise ValueError("question and questions are both given: one of them is enough")
        asked = [question] if question is not None else questions
        if asked is not None and (
            isinstance(asked, str) or not all(isinstance(one, str) for one in asked) or not asked
        ):
            raise ValueError(f"question is a text and questions a list of texts, found {questions or question!r:.60}")
        if think is not None and think not in THINK:
            raise ValueError(f"think={think!r}; valid: {', '.join(THINK)}")
        for name, value in (("max_new_tokens", max_new_tokens), ("max_context_length", max_context_length)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; at least 1")
        before = {"questions": asked, "answer_prefix": answer_prefix, "max_context_length": max_context_length}
        before["think"] = think
        forward: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        if method is not None or budget is not None or settings:
            forward["method"] = method_of(method, budget, settings)
        after = {"single": questions is None} if asked is not None else {}
        given = ({key: value for key, value in part.items() if value is not None} for part in (before, forward, after))
        first, second, third = given
        return first, second, third

    def preprocess(  # type: ignore[override]
        self,
        context: str,
        questions: Sequence[str] = ("",),
        answer_prefix: str = "",
        max_context_length: int | None = None,
        think: str = "off",
    ) -> dict[str, Any]:
        """Token ids of a context and its questions, and whether each answer begins inside a thinking part.

        Raises:
            ValueError: the context is no text, or longer than the model takes.
        """
        import torch

        from kvcompress.common.prose import Encoder
        from kvcompress.data import jsonl, think_rules, thinking
        from kvcompress.data.haystack import prompt_template

        jsonl.whole(context, "context", "pipeline")
        tokenizer: Any = self.tokenizer
        if think == "off":
            try:
                tokenizer = think_rules.without_thinking(tokenizer)
            except ValueError:  # a model that does not think
                tokenizer = self.tokenizer
        encode = Encoder(tokenizer)
        end = "" if getattr(tokenizer, "chat_template", None) else "\n"  # parts question and answer
        frames = [
            prompt_template(
                tokenizer, encode, context, jsonl.whole(one, "question", "pipeline") + end, answer_prefix, "auto"
            )
            for one in questions
        ]
        head, tails = list(frames[0].head), [frame.tail for frame in frames]
        limit = self.model.config.get_text_config().max_position_embeddings if max_context_length is None else None
        if max_context_length is not None and len(head) > max_context_length:
            _warn(f"the context of {len(head)} tokens is cut to max_context_length={max_context_length}")
            head = head[:max_context_length]
        elif limit is not None and len(head) + max(map(len, tails)) >= limit:
            raise ValueError(
                f"the context has {len(head)} tokens and its longest question {max(map(len, tails))}; the model has {limit} "
                "positions: shorten it, or have its end cut off with max_context_length"
            )
        begins = [thinking.begins_thinking(tokenizer, tokenizer.decode(tail)) for tail in tails]
        return {
            "context_ids": torch.tensor([head]),
            "questions_ids": [torch.tensor([tail]) for tail in tails],
            "thinking": begins,
        }

    def _forward(  # type: ignore[override]
        self, inputs: dict[str, Any], method: Method | None = None, max_new_tokens: int = MAX_NEW_TOKENS
    ) -> dict[str, Any]:
        """Token ids of each answer: the context is prefilled and compressed once, each question asked of a copy."""
        from kvcompress.hook.session import compress
        from kvcompress.methods import method_of
        from kvcompress.models import compat
        from kvcompress.models.loading import eos_ids

        method = method or method_of(None, None, {})
        if any(isinstance(ids, list) for ids in inputs["questions_ids"]) or len(inputs["context_ids"]) != 1:
            raise ValueError("batch_size is not 1: each context is compressed by itself; leave batch_size out")
        limit, longest = compat.max_positions(self.model), max(ids.shape[1] for ids in inputs["questions_ids"])
        needed = inputs["context_ids"].shape[1] + longest + max_new_tokens
        if limit is not None and needed > limit and not method.compact_positions:
            raise ValueError(
                f"the context, its longest question and max_new_tokens={max_new_tokens} need {needed} positions; the model has "
                f"{limit}: shorten one of them, or have the context's end cut off with max_context_length"
            )
        stop = eos_ids(self.model, self.tokenizer)
        answers: list[list[int]] = []
        with compress(self.model, method, tokenizer=self.tokenizer) as session:
            session.prefill(inputs["context_ids"])
            held, last = session.cache, len(inputs["questions_ids"]) - 1
            assert held is not None
            for number, ids in enumerate(inputs["questions_ids"]):
                session.cache = held.fork() if number < last else held
                if ids.shape[1]:
                    session.append(ids)
                answers.append([int(token) for token in session.generate(max_new_tokens, stop=stop).tokens[0]])
        return {"tokens": answers, "thinking": inputs["thinking"]}

    def postprocess(self, outputs: dict[str, Any], single: bool = True) -> dict[str, Any]:  # type: ignore[override]
        """`answer` of one question, `answers` of several: text behind any thinking part, without special tokens."""
        from kvcompress.data.thinking import Output, decode

        pairs = zip(outputs["tokens"], outputs["thinking"], strict=True)
        texts = [_answer(Output(decode(self.tokenizer, tokens), inside)) for tokens, inside in pairs]
        return {"answer": texts[0]} if single else {"answers": texts}


def _answer(output: Any) -> str:
    """An output's answer; blank space that parts it from a thought is none of it."""
    return output.text if output.answer == output.text else output.answer.lstrip()


def _warn(text: str) -> None:
    import warnings

    warnings.warn(text, stacklevel=2)
