"""A row of a batch whose numbers are not numbers leaves its neighbours as they are alone, and is named."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from helpers import EVICTING, make
from small_models import random_ids, small_model

from kvcompress import compress
from kvcompress.data.task import Sample, Turn
from kvcompress.methods import Full, SnapKV
from kvcompress.sweep import batches

BROKEN = 7  # a token whose embedding is NaN


@pytest.fixture(scope="module")
def model():
    model = small_model(fresh=True)
    model.get_input_embeddings().weight.data[BROKEN] = math.nan
    return model


def rows():
    """A sound row, and one with the broken token in its middle."""
    ids = random_ids(2, 24).masked_fill(random_ids(2, 24) == BROKEN, BROKEN + 1)
    ids[1, 12] = BROKEN
    return ids


@pytest.mark.parametrize("name", EVICTING)
def test_the_sound_row_keeps_and_answers_as_alone(name, model):
    ids = rows()
    with compress(model, make(name, 0.5)) as session:
        session.prefill(ids[:1])
        alone = session.generate(4).tokens[0], session.cache.row(0), session.cache.logits
    with compress(model, make(name, 0.5)) as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session.prefill(ids)
        answer = session.generate(4)
        assert answer.tokens[0] == alone[0] and answer.finished == ["length", "nan"] and answer.tokens[1] == []
        assert torch.allclose(session.cache.logits[:1], alone[2], atol=1e-5)
        held = session.cache.row(0)
        for layer in range(len(held.layers)):
            found, expected = (cache.positions(layer)[0].sort(-1).values for cache in (held, alone[1]))
            for one, other in zip(found, expected, strict=True):
                assert one[one >= 0].tolist() == other[other >= 0].tolist()


def test_a_warning_and_the_report_name_the_row(model):
    ids = rows()
    with compress(model, SnapKV(budget=0.5, window=4)) as session:
        with pytest.warns(UserWarning, match="NaN in row 1 of a batch of 2"):
            session.prefill(ids)
        assert any("NaN in row 1" in note for note in session.report()["notes"])
        assert not any("NaN" in note for note in session.report(row=0)["notes"])
        assert any("NaN" in note for note in session.report(row=1)["notes"])


def test_a_prompt_alone_whose_scores_are_nan_is_refused(model):
    with compress(model, SnapKV(budget=0.5, window=4)) as session, pytest.raises(ValueError, match="NaN"):
        session.prefill(rows()[1:])


def test_an_answer_of_nothing_but_nan_is_refused(model):
    with compress(model, Full()) as session:
        session.prefill(rows()[1:])
        with pytest.raises(ValueError, match="NaN after 0 tokens"):
            session.generate(4)


def test_a_nan_row_does_not_end_the_sampling_of_its_neighbour(model):
    with compress(model, Full()) as session:
        session.prefill(rows())
        answer = session.generate(4, temperature=1.0, seed=1)
        assert answer.finished == ["length", "nan"] and len(answer.tokens[0]) == 4


def test_a_batch_of_samples_gives_an_error_for_the_nan_one_alone(model):
    samples = [
        Sample(id=name, segments=(tuple(ids.tolist()),), turns=(Turn(ids=(), references=("x",), max_new_tokens=3),))
        for name, ids in zip(("sound", "broken"), rows(), strict=True)
    ]
    with compress(model, Full()) as session:
        sound, broken = batches.run(session, samples)
    assert len(sound["tokens"][0]) == 3
    assert isinstance(broken, ValueError) and "'broken'" in str(broken)
