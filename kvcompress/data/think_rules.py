"""Rules of thinking while an answer is written: switched off, given a budget of tokens, dropped from a conversation.

A budget is forced: after so many tokens of thinking the mark that ends them is put in for the model, which then answers
(budget forcing: Muennighoff et al., 2025, arXiv 2501.19393; Qwen3 documents the same for its thinking budget). The
alternative, to count such an output as unfinished, is what happens without a budget: everything shares one limit, and a
thought that it cuts off is no answer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcompress.common.tokenization import plain_ids
from kvcompress.data.task import Sample, Turn
from kvcompress.data.thinking import (
    CLOSE,
    MARKS,
    OPENING,
    ThoughtTracker,
    begins_by_turn,
    decode,
    generation_prompt,
    last_mark,
    unfinished,
)
from kvcompress.hook.generation import ENDED

MODES = ("keep", "drop", "off")
SWITCHES = ("enable_thinking", "thinking")  # variables that chat templates read


# ---------------------------------------------------------------------- thinking switched off


def switches(template: str) -> list[str]:
    """Variables of a chat template that turn thinking on and off."""
    code = " ".join(re.findall(r"\{[%{](.*?)[%}]\}", template, re.DOTALL))
    code = re.sub(r"'[^']*'|\"[^\"]*\"", "", code)
    return [name for name in SWITCHES if re.search(rf"(?<![.\w]){name}\b", code)]


def without_thinking(tokenizer: Any) -> Any:
    """A copy of a tokenizer whose chat template has the model answer without thinking.

    A template's own switch is turned off; a part that it opens all the same is closed, empty.

    Raises:
        ValueError: there is no chat template, or it neither has a switch nor opens a thinking part.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ValueError(
            "think=off: this tokenizer has no chat template that could switch thinking off; use think=keep"
        )
    found, quiet = switches(template), copy.copy(tokenizer)
    quiet.chat_template = "".join(f"{{% set {name} = false %}}" for name in found) + template
    written = generation_prompt(quiet)
    if unfinished(written):
        opened, _ = last_mark(written, OPENING)
        mark = next(one for one in OPENING if written.startswith(one, opened))
        blank = len(written) - len(written.rstrip("\n"))
        end = "\\n" * max(0, 2 - blank) + MARKS[mark] + "\\n\\n"
        # of a template's last line jinja drops the end
        quiet.chat_template = (
            quiet.chat_template.removesuffix("\n") + f"{{% if add_generation_prompt %}}{{{{ '{end}' }}}}{{% endif %}}"
        )
    elif not found:
        raise ValueError(
            f"think=off: this chat template has no switch ({', '.join(SWITCHES)}) and opens no thinking part; use think=keep"
        )
    return quiet


# ---------------------------------------------------------------------- a budget of thinking


@dataclass(frozen=True)
class ThinkRules:
    """Rules of one answer, from which a guide is made for each row that is decoded.

    Attributes:
        answer_tokens: length of the answer alone at most, where thinking has a budget.
        budget: tokens of thinking at most; None: they count as any others.
        inside: the prompt ended inside a thinking part.
        asleep: stop tokens of a task that do not count inside a thinking part, nor before the answer behind it begins.
    """

    tokenizer: Any
    answer_tokens: int
    budget: int | None = None
    inside: bool = False
    asleep: frozenset[int] = frozenset()

    @property
    def most(self) -> int:
        """Tokens of thought, marks and answer at most."""
        marks = 0 if self.budget is None else self.budget + len(self._closing) + self._opening
        return self.answer_tokens + marks

    @property
    def _closing(self) -> list[int]:
        return plain_ids(self.tokenizer, f"\n{CLOSE}\n\n")

    @property
    def _opening(self) -> int:
        return max(len(plain_ids(self.tokenizer, mark)) for mark in OPENING)

    def guide(self) -> ThinkGuide | None:
        """A guide for one row; None where nothing is ruled."""
        return None if self.budget is None and not self.asleep else ThinkGuide(self)

    def kept(self, tokens: Sequence[int]) -> list[int]:
        """Ids of an output as they stay in a conversation from which thoughts are dropped.

        A part that the prompt opened is closed, empty; of an output that ends inside a part nothing else stays.
        """
        tracker, tokens = ThoughtTracker(self.tokenizer, self.inside), list(tokens)
        for length in range(1, len(tokens) + 1):
            tracker(tokens[:length])
        answer = [] if tracker.inside else tokens[tracker.answer :]
        return [*(self._closing if self.inside else []), *answer]


class ThinkGuide:
    """Follows one row's output, `kvcompress.hook.generation.Guide`: ends a thought that has used up its budget, and the
    answer where it is as long as it may be."""

    def __init__(self, rules: ThinkRules) -> None:
        self.rules, self._tokens = rules, list[int]()
        self._tracker = ThoughtTracker(rules.tokenizer, rules.inside)
        self._thought = self._answer = 0
        self._due: list[int] = []  # of a mark that is put in
        self._put_in = False  # the last token is one of these

    def __call__(self, tokens: list[int]) -> int | None:
        self._tokens = tokens
        before, picked, budget = self._tracker.inside, bool(tokens) and not self._put_in, self.rules.budget
        inside = self._tracker(tokens) if tokens else before
        self._put_in = False
        if budget is None:
            return None
        if picked and inside:
            self._thought += 1
        elif picked and not before and not self._may_open():
            self._answer += 1
        if inside and not self._due and self._thought >= budget:
            self._due = self._closing()
        if self._due:
            self._put_in = True
            return self._due.pop(0)
        return ENDED if self._answer >= self.rules.answer_tokens else None

    def stops(self, token: int) -> bool:
        if token not in self.rules.asleep:
            return True
        answer = self._tokens[self._tracker.answer :]
        begun = self._tracker.mark is None or decode(self.rules.tokenizer, answer).strip()
        return not self._tracker.inside and bool(begun)

    def _may_open(self) -> bool:
        """True while all there is may be the beginning of an opening mark, which is several tokens."""
        if self._tracker.mark is not None or len(self._tokens) > self.rules._opening:
            return False
        text = decode(self.rules.tokenizer, self._tokens).lstrip()
        return any(mark.startswith(text) for mark in OPENING)

    def _closing(self) -> list[int]:
        """Ids that end the thought: the mark of the one that is open, on a line of its own."""
        text = decode(self.rules.tokenizer, self._tokens)
        opened, _ = last_mark(text, OPENING)
        mark = next((MARKS[one] for one in OPENING if opened >= 0 and text.startswith(one, opened)), CLOSE)
        return plain_ids(self.rules.tokenizer, f"\n{mark}\n\n")


def prepared(sample: Sample, tokenizer: Any, think: str = "keep", budget: int | None = None) -> Sample:
    """A sample whose answers follow the rules of thinking.

    With a budget `max_new_tokens` of a turn is what its thought, marks and answer may take together; before, and in what
    the guide counts, it is the answer's alone.

    Args:
        think: "keep", "drop" or "off", as in a configuration; off is the tokenizer's matter (`without_thinking`).
    """
    asleep = [frozenset(turn.stop) for turn in sample.turns]
    if budget is None and think != "drop" and not any(asleep):
        turns = sample.turns
    else:
        end = str(sample.meta.get("prompt_last") or tokenizer.decode(sample.prompt_ids()[-200:]))
        turns = tuple(
            _ruled(turn, ThinkRules(tokenizer, turn.max_new_tokens, budget, inside, stops))
            for turn, inside, stops in zip(sample.turns, begins_by_turn(tokenizer, sample, end), asleep, strict=True)
        )
    said: dict[str, Any] = {} if think == "keep" else {"think": think}
    said |= {} if budget is None else {"think_tokens": budget}
    return replace(sample, turns=turns, protocol={**sample.protocol, **said})


def _ruled(turn: Turn, rules: ThinkRules) -> Turn:
    return replace(turn, rules=rules, max_new_tokens=rules.most)
