"""Thinking parts of outputs: their marks as text or special tokens, and the answer behind them.

A tokenizer may hold a mark (`<think>`) as one special token, as one ordinary token, or as several. Special tokens are
left out of decoded text as a rule, and with them the end of a thought: `decode` keeps the marks, so that an output is
judged alike whatever its tokenizer declares. Who opens the mark does not matter either: the model, the chat template,
or the end of a prompt. Rules of thinking while an answer is written are in `kvcompress.data.think_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcompress.common.tokenization import plain_ids

if TYPE_CHECKING:
    from kvcompress.data.task import Sample

MARKS = {  # what opens a thinking part: what closes it
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "◁think▷": "◁/think▷",
    "<|begin_of_thought|>": "<|end_of_thought|>",
}
OPEN, CLOSE = next(iter(MARKS.items()))
OPENING, CLOSING = tuple(MARKS), tuple(MARKS.values())
LOOK_BACK = 2  # tokens searched for a text beyond those it takes itself, as lm-eval does


@dataclass(frozen=True)
class Output:
    """One output: its text with thinking marks, and whether it begins inside a thinking part that the prompt opened."""

    text: str
    thinking: bool = False

    @property
    def unfinished(self) -> bool:
        """It ends inside a thinking part."""
        return unfinished(self.text, self.thinking)

    @property
    def answer(self) -> str:
        """What is judged: the text behind the last thinking part; "" where it ends inside one."""
        return answer_part(self.text, self.thinking)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of an output without special tokens, but with its thinking marks."""
    found = _special(tokenizer).intersection(ids)
    if not found:
        return tokenizer.decode(ids)
    marks = {token for token in found if tokenizer.decode([token]).strip() in {*OPENING, *CLOSING}}
    if not marks:
        return tokenizer.decode(ids, skip_special_tokens=True)
    return tokenizer.decode([token for token in ids if token in marks or token not in found])


def _special(tokenizer: Any) -> set[int]:
    """Ids that `skip_special_tokens` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*getattr(tokenizer, "all_special_ids", ()), *(token for token, about in added.items() if about.special)}


def last_mark(text: str, marks: Sequence[str]) -> tuple[int, int]:
    """Start and end of the last of these marks in a text; (-1, 0) where there is none."""
    return max(((at, at + len(mark)) for mark in marks if (at := text.rfind(mark)) >= 0), default=(-1, 0))


def ends_open(text: str) -> bool:
    """True if a prompt's text ends in an opening mark."""
    return text.rstrip().endswith(OPENING)


def unfinished(text: str, thinking: bool = False) -> bool:
    """True if a text ends inside a thinking part, its own or (`thinking`) the one that the prompt ended in."""
    closed, _ = last_mark(text, CLOSING)
    opened, _ = last_mark(text, OPENING)
    return opened > closed or (thinking and closed < 0)


def answer_part(text: str, thinking: bool = False) -> str:
    """What stands behind the last thinking part; "" where the text ends inside one."""
    return "" if unfinished(text, thinking) else text[last_mark(text, CLOSING)[1] :]


class ThoughtTracker:
    """Whether an output that grows token by token is inside a thinking part.

    Attributes:
        inside: it is, after the tokens that were shown.
        answer: number of the first token behind the last part that was closed; 0 where none was.
        mark: number of a token before the mark that closed it; None where none was.
    """

    def __init__(self, tokenizer: Any, inside: bool = False) -> None:
        self.tokenizer, self.inside, self.answer = tokenizer, inside, 0
        self.mark: int | None = None
        self._width = LOOK_BACK + max(len(plain_ids(tokenizer, mark)) for mark in (*OPENING, *CLOSING))

    def __call__(self, tokens: Sequence[int]) -> bool:
        """`inside`, with `tokens` all so far: one more than at the last call."""
        recent = decode(self.tokenizer, tokens[max(self.answer, len(tokens) - self._width) :])
        closed, opened = last_mark(recent, CLOSING), last_mark(recent, OPENING)
        if self.inside and closed[0] > opened[0]:
            self.inside, self.answer = False, len(tokens)
            self.mark = max(0, len(tokens) - self._width)
        elif opened[0] > closed[0]:
            self.inside = True
        return self.inside


def template_opens(tokenizer: Any) -> bool:
    """True if the tokenizer's chat template opens a thinking part for the model."""
    return unfinished(generation_prompt(tokenizer))


def generation_prompt(tokenizer: Any) -> str:
    """What the chat template writes between a user's message and the answer; "" where there is no such template."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    mark = "\x1emessage\x1e"
    chat = [{"role": "user", "content": mark}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception:  # whatever a template raises that takes no single message: it is not what wrote the prompt
        return ""
    return text.partition(mark)[2]


def start_answer(tokenizer: Any, prompt: str, answer: str) -> str:
    """A prompt in the chat template's words with the start of its answer, which stands behind any thinking part.

    Where the template opens a thinking part and an answer is begun for the model, that part is closed, empty.
    """
    if answer.strip() and template_opens(tokenizer):
        opened, _ = last_mark(prompt, OPENING)
        mark = next(one for one in OPENING if prompt.startswith(one, opened))
        prompt = f"{prompt.rstrip()}\n\n{MARKS[mark]}\n\n"
    return prompt + answer


def begins_thinking(tokenizer: Any, prompt: str) -> bool:
    """True if the answer to a prompt, of which the end is given as text, begins inside a thinking part."""
    if ends_open(prompt):
        return True
    written = generation_prompt(tokenizer)
    return unfinished(written) and prompt.endswith(written[-len(prompt) :])


def begins_by_turn(tokenizer: Any, sample: Sample, prompt_end: str) -> list[bool]:
    """Per turn of a sample whether its answer begins inside a thinking part.

    Args:
        prompt_end: the last characters of the first prompt, and of later ones that have no ids of their own.
    """
    ends = [tokenizer.decode(one.ids) if number and one.ids else prompt_end for number, one in enumerate(sample.turns)]
    return [begins_thinking(tokenizer, end) for end in ends]


def decoded(tokenizer: Any, sample: Sample, outputs: Sequence[Sequence[int]], prompt_end: str) -> list[Output]:
    """The outputs of a sample, one per turn, or several of its only turn."""
    begins = begins_by_turn(tokenizer, sample, prompt_end)
    if len(begins) < len(outputs):
        begins += [begins[-1]] * (len(outputs) - len(begins))
    return [Output(decode(tokenizer, ids), begun) for ids, begun in zip(outputs, begins, strict=False)]
