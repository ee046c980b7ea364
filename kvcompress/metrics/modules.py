"""The metrics as modules of `evaluate`, for `evaluate.combine` and the like; they need no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from kvcompress.metrics import scores


class AnswerMetric(evaluate.Metric):
    """Mean over samples of one metric of `kvcompress.metrics.scores`, 0 to 1."""

    def __init__(self, name: str, **options: Any):
        self.metric = name
        super().__init__(config_name=name, **options)

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        rule = scores.JOINT.get(self.metric) or scores.PAIRWISE.get(self.metric) or scores.classification
        return evaluate.MetricInfo(
            description=rule.__doc__ or "",
            citation="",
            module_name=self.metric,
            inputs_description="predictions: strings; references: one list of strings each; classes: of classification",
            features=datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
        )

    def _compute(  # type: ignore[override]
        self, predictions: Sequence[str], references: Sequence[Sequence[str]], classes: Sequence[str] = ()
    ) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        values = [scores.score(self.metric, prediction, list(answers), classes) for prediction, answers in pairs]
        return {self.metric: sum(values) / len(values)}


def load(name: str, **options: Any) -> AnswerMetric:
    """An `evaluate` module for one of our metrics.

    Example:
        >>> load("qa_f1").compute(predictions=["the cat"], references=[["cat", "a dog"]])
        {'qa_f1': 1.0}

    Raises:
        ValueError: for an unknown name, with the valid ones.
    """
    if name not in scores.VERSIONS:
        raise ValueError(f"metric {name!r} is unknown; valid: {', '.join(scores.VERSIONS)}")
    return AnswerMetric(name, **options)
