"""Single queries over codes: as over what the codes stand for, of which no step makes more than a block."""

from __future__ import annotations

import pytest
import torch
from small_models import left_padded, random_ids, small_model
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompress import compress
from kvcompress.cache.encoding import LayerEncoding
from kvcompress.kernels import coded_rows
from kvcompress.methods import H2O, AdaKV, Full, Int8, LowRank, SnapKV, TurboQuant

TEXT = {"tokens": 128, "length": 32}
CODECS = [
    Int8(),
    TurboQuant(bits=4),
    TurboQuant(bits=3, mode="prod"),
    LowRank(budget=0.5, **TEXT),
    LowRank(budget=0.4, bits=4, **TEXT),
    LowRank(budget=0.5, head_group=2, **TEXT),
    LowRank(budget=0.4, form="mla", bits=4, **TEXT),
]
JOINT = CODECS[-2:]


def steps(model, method):
    """Logits of a padded batch: steps in which both rows go on, and one in which the second does not."""
    ids, mask = left_padded([40, 25])
    with compress(model, method) as session:
        session.prefill(ids, attention_mask=mask)
        found = [session.step(random_ids(2, 1, t)) for t in range(3)]
        found.append(session.step(random_ids(2, 1, 9), torch.tensor([True, False])))
        return torch.stack(found), session.report()["kernel"]


def expanded(monkeypatch, model, method):
    with monkeypatch.context() as patch:
        for name in ("rows", "lane_rows"):
            patch.setattr(LayerEncoding, name, lambda self, store: None)
        return steps(model, method)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_attention_over_codes_equals_attention_over_all_that_they_stand_for(codec, monkeypatch):
    model = small_model()
    expected, kernels = expanded(monkeypatch, model, codec)
    monkeypatch.setattr(coded_rows, "BLOCK_NUMBERS", 1 << 8)
    monkeypatch.setattr(coded_rows, "LEAST_SLOTS", 8)
    found, named = steps(model, codec)
    assert (found - expected).abs().max() <= 1e-5
    assert "codes" in named and "codes" not in kernels


@pytest.mark.parametrize(
    "make",
    [lambda codec: SnapKV(budget=0.5, window=3, codec=codec), lambda codec: AdaKV(budget=0.5, window=3, codec=codec),
     lambda codec: H2O(budget=9, codec=codec)],
    ids=["SnapKV", "AdaKV", "H2O"],
)  # fmt: skip
@pytest.mark.parametrize("codec", [CODECS[0], CODECS[3]], ids=str)
def test_what_eviction_left_is_attended_to_likewise(make, codec, monkeypatch):
    """In lanes, with holes, and with the probabilities that H2O adds up, named as the kernel that yields them."""
    model, method = small_model(), make(codec)
    expected, kernels = expanded(monkeypatch, model, method)
    monkeypatch.setattr(coded_rows, "BLOCK_NUMBERS", 1 << 8)
    found, named = steps(model, method)
    assert (found - expected).abs().max() <= 1e-5
    assert ("blockwise" if isinstance(method, H2O) else "lanes") in named


def test_layers_with_a_soft_cap_attend_to_codes_too(monkeypatch):
    model = small_model("gemma2")
    expected, _ = expanded(monkeypatch, model, Full(codec=Int8()))
    found, named = steps(model, Full(codec=Int8()))
    assert (found - expected).abs().max() <= 1e-5 and "codes" in named


class Largest(TorchDispatchMode):
    """Notes how many floats the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and (made.is_floating_point() or made.is_complex()):
            wide = made.numel() * made.element_size() // 4
            self.numbers = max(self.numbers, wide if not func.is_view else 0)
        return made


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_no_step_makes_more_numbers_of_codes_than_a_block(codec, monkeypatch):
    """Beside the numbers of a block a step makes logits and angles, which grow with the tokens, and no keys or values."""
    model, tokens = small_model(layers=1), 900
    monkeypatch.setattr(coded_rows, "BLOCK_NUMBERS", 1 << 10)
    with compress(model, codec) as session:
        session.prefill(random_ids(1, tokens))
        session.step(random_ids(1, 1))
        with Largest() as largest:
            session.step(random_ids(1, 1, 1))
    assert largest.numbers < tokens * 2 * 16 / 2
