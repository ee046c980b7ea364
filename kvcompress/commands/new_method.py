"""Start a method: its file, its yaml and its test, which work at once and say what to change.

kvcompress new-method LongKeys        methods/longkeys.py, conf/method/longkeys.yaml, tests/methods/test_longkeys.py

See docs/new_method.md for a walk through.
"""

from __future__ import annotations

from kvcompress.commands.scaffold import YAML, Scaffold

METHOD = '''\
"""NAME: TODO what it does in half a sentence (TODO authors, venue, arXiv number)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvcompress.method import LayerView, Method, Observed, Schedule, Scorer, State, Tensor


@dataclass(frozen=True)
class NAMEScorer(Scorer):
    """TODO what makes a token matter. Until you change it: how recent it is, beside the first `sinks`."""

    sinks: int = 4

    # TODO for attention, say what you need and take it from `observed`:
    #     @property
    #     def needs(self) -> Needs:
    #         return Needs(window=32)        # or Needs(mass=True)

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        # TODO float32 [B, H_kv, P], higher is kept, from view.keys, view.values, view.positions or `observed`
        return view.positions.float()


@dataclass(frozen=True, kw_only=True)
class NAME(Method):
    """TODO what is kept, and when (paper section).

    Attributes:
        sinks: first tokens that are always kept.
        decode: evict after every decoded token; otherwise decoded tokens are appended beyond the budget.
    """

    # what the table of methods shows; scripts/method_table.py writes it
    family = "TODO"  # baseline, recency, attention, keys and values, layer budgets, head budgets, …
    keeps = "TODO"
    source = "TODO"  # "arXiv 2404.14469; owner/repository"
    differences = "TODO"  # from the released code

    # fields left at None are filled from here; name what the sources set differently
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"decode": False}}

    sinks: int = 4
    decode: bool | None = None

    def check(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}; at least 0")

    def reserved(self) -> int:
        return self.sinks

    def make_scorer(self) -> NAMEScorer:
        return NAMEScorer(self.sinks)

    def make_schedule(self) -> Schedule:
        return Schedule(every=1 if self.decode else None)
'''

TEST = '''\
"""NAME keeps what a plain loop keeps. TODO its own invariants: what must hold whatever the model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from reference import Choice, Loop, best
from test_references import BUDGET, SIZES, follow

from kvcompress.methods import NAME


@dataclass
class LoopNAME(Loop):
    """The definition, slowly: no tensor operation over tokens."""

    in_decode: bool = False
    sinks: int = 4

    def decide(self, layer, b, query, key, features, row):
        cap = self.caps[b]
        sinks = min(self.sinks, cap - 1)
        for h in range(len(row)):
            columns = sorted(row[h])
            if len(columns) > cap:
                protected = set(columns[:sinks])
                # TODO the score of each column, from key[h, column] (or self.probabilities for attention)
                scores = {c: float(c) for c in columns if c not in protected}
                row[h] = best(scores, cap - len(protected)) | protected
                self.choices[layer, b, h] = Choice(set(row[h]), scores, protected)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("budget", [BUDGET, 0.3])
def test_it_keeps_what_the_loop_keeps(sizes, budget):
    """A batch of a whole and a left-padded row, a later turn and decode, one to four query heads per KV head."""
    follow(NAME(budget=budget), LoopNAME, sizes=sizes, later=(1, 1, 9, 1))


def test_it_evicts_in_decode_where_asked():
    follow(NAME(budget=BUDGET, decode=True), LoopNAME, later=(1,) * 6, in_decode=True)


@pytest.mark.parametrize("options", [{"sinks": -1}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        NAME(budget=0.5, **options)
'''


def _taken() -> dict[str, str]:
    from kvcompress.sweep.components import method_classes

    return {name: cls.__name__ for name, cls in method_classes().items()}


def _reserved(name: str) -> bool:
    from kvcompress import method

    return name in (*method.__all__, "METHODS", "Any", "ClassVar") or f"{name}Scorer" in method.__all__


METHODS = Scaffold(
    kind="method",
    example="LongKeys",
    templates={"methods/LOWER.py": METHOD, "conf/method/LOWER.yaml": YAML, "tests/methods/test_LOWER.py": TEST},
    taken=_taken,
    reserved=_reserved,
    advice=(
        "It works at once: python -m pytest tests/methods/test_LOWER.py, and `method=LOWER`.\n"
        "Now change what says TODO (docs/new_method.md walks through one), then run scripts/method_table.py."
    ),
)
files = METHODS.files


def main(arguments: list[str] | None = None) -> int:
    return METHODS.main(arguments, __doc__)
