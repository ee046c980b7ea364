"""Start a task: its file, its yaml and its test, which work at once and say what to change.

kvcompress new-task LastBox        tasks/lastbox.py, conf/task/lastbox.yaml, tests/tasks/test_lastbox.py

See docs/new_task.md for a walk through. Questions in a file of one's own need no code: task=jsonl.
"""

from __future__ import annotations

from kvcompress.commands.scaffold import YAML, Scaffold

TASK = '''\
"""NAME: TODO what it asks in half a sentence (TODO authors, venue, arXiv number)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcompress import metrics
from kvcompress.common.prose import Encoder
from kvcompress.data import prompts
from kvcompress.data.haystack import prompt_template
from kvcompress.data.task import Sample, Task, Turn


@dataclass(frozen=True, kw_only=True)
class NAME(Task):
    """TODO what is asked, and what the score says.

    Attributes:
        n_samples: prompts; lines: of each context.
        question: "hidden" during compression, or "seen".
        template: "auto" (chat where the tokenizer has a template), "chat" or "none".
        max_new_tokens: of an answer.
    """

    name: ClassVar[str] = "LOWER"
    version: ClassVar[str] = "1"  # raise it whenever a prompt may change
    metric: ClassVar[str] = "string_match_all"  # TODO a name of kvcompress.metrics, or of your own rule in `score`
    metric_version: ClassVar[str] = "1"  # raise it whenever a score may change

    n_samples: int = 5
    lines: int = 40
    question: str = "hidden"
    template: str = "auto"
    max_new_tokens: int = 16

    def __post_init__(self) -> None:
        for field, values in {"question": ("hidden", "seen"), "template": prompts.TEMPLATES}.items():
            if getattr(self, field) not in values:
                raise ValueError(f"task.{field}={getattr(self, field)!r}; valid: {', '.join(values)}")
        for field in ("n_samples", "lines", "max_new_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"task.{field}={getattr(self, field)}; at least 1")

    def made(self, number: int) -> tuple[str, str, str]:
        """Context, question and answer of a sample; every random choice follows from the seed and its number."""
        draw = random.Random(f"LOWER:{self.seed}:{number}")
        # TODO
        codes = {f"box {at}": str(draw.randrange(1000, 10000)) for at in range(1, self.lines + 1)}
        box = draw.choice(sorted(codes))
        context = "\\n".join(f"The code of {name} is {code}." for name, code in codes.items())
        return context, f"What is the code of {box}? Answer with the number alone.", codes[box]

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        for number in range(self.n_samples):
            context, question, answer = self.made(number)
            frame = prompt_template(tokenizer, Encoder(tokenizer), context, f"\\n\\n{question}", "", self.template)
            hidden = self.question == "hidden"
            yield Sample(
                id=f"LOWER-s{self.seed}.{number}",
                segments=(frame.head if hidden else (*frame.head, *frame.tail),),
                turns=(Turn(frame.tail if hidden else (), self.max_new_tokens, references=(answer,)),),
                protocol={"question": self.question, "template": frame.template},
                meta=prompts.facts(tokenizer, (*frame.head, *frame.tail)),
            )

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """TODO what 1 means. Until you change it: the answer contains the code."""
        return {"score": metrics.score(self.metric, out["text"][0], sample.turns[0].references)}
'''

TEST = '''\
"""NAME asks what its definition says. TODO its own invariants: what must hold whatever the tokenizer."""

from __future__ import annotations

import pytest

from kvcompress import compress, load
from kvcompress.methods import SnapKV
from kvcompress.models.loading import load_tokenizer
from kvcompress.sweep import sanity
from kvcompress.tasks import NAME

TOKENIZER = load_tokenizer("random/llama")


def test_samples_follow_from_the_seed():
    first, again, other = (list(NAME(n_samples=2, seed=seed).samples(TOKENIZER)) for seed in (0, 0, 1))
    assert first == again and [one.id for one in first] != [one.id for one in other]
    assert first[0].segments != other[0].segments


def test_right_answers_score_one_and_empty_ones_nothing():
    task = NAME(n_samples=3)
    assert sanity.check(task, list(task.samples(TOKENIZER))) == sanity.Sanity(1.0, 1.0)


def test_a_question_that_is_hidden_is_the_same_prompt_as_one_that_is_seen():
    hidden, seen = (next(iter(NAME(question=how).samples(TOKENIZER))) for how in ("hidden", "seen"))
    assert hidden.prompt_ids() == seen.prompt_ids() and hidden.turns[0].ids and not seen.turns[0].ids


def test_it_runs_with_a_compressed_cache():
    model, tokenizer = load("random/llama")
    task = NAME(n_samples=1, lines=5, max_new_tokens=2)
    sample = next(iter(task.samples(tokenizer)))
    with compress(model, SnapKV(budget=0.5)) as session:
        out = task.run(session, sample)
    assert len(out["tokens"]) == 1 and out["end"]["active"]


@pytest.mark.parametrize("options", [{"n_samples": 0}, {"question": "secret"}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        NAME(**options)
'''


def _taken() -> dict[str, str]:
    from kvcompress.tasks import TASKS

    return {name.lower(): f"task={task.name}" for task in TASKS.values() for name in (task.name, task.__name__)}


def _reserved(name: str) -> bool:
    return name in ("Any", "ClassVar", "Encoder", "Iterator", "Sample", "TASKS", "Task", "Turn")


TASKS = Scaffold(
    kind="task",
    example="LastBox",
    templates={"tasks/LOWER.py": TASK, "conf/task/LOWER.yaml": YAML, "tests/tasks/test_LOWER.py": TEST},
    taken=_taken,
    reserved=_reserved,
    advice=(
        "It works at once: python -m pytest tests/tasks/test_LOWER.py, and `task=LOWER`.\n"
        "Now change what says TODO (docs/new_task.md walks through one)."
    ),
)
files = TASKS.files


def main(arguments: list[str] | None = None) -> int:
    return TASKS.main(arguments, __doc__)
