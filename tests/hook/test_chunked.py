"""A prompt in chunks never holds more than budget and chunk, for every method, and needs less memory than at once."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import EVICTING, all_held, every_method, load_script, make
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.bench.chunked import compare, held_bytes
from kvcompress.cache.layouts import DENSE_WASTE
from kvcompress.cache.layouts.ragged import SMALLEST_LANE as LANE
from kvcompress.measure.measuring import PeakMemory
from kvcompress.method import Chunked, OneShot

BUDGET, CHUNK = 24, 16


LENGTH = 70


def most_held(name, architecture="llama", length=LENGTH, **options):
    """The most keys and values held at any layer call, in tokens of all full-attention layers, and how often looked."""
    model = small_model(architecture, **options)
    with compress(model, make(name, BUDGET, prefill=Chunked(CHUNK))) as session:
        with held_bytes(session) as held:
            assert session.prefill(random_ids(1, length)).logits.isfinite().all()
        token = session.cache.nbytes()["full"] // length
        assert session.cache.kept_tokens().sum() <= BUDGET * session.cache.kept_tokens().numel()
        assert "after_attention" not in session.compressor.__dict__
    assert not any(m._forward_pre_hooks for m in model.modules())
    return held.valid / token, held.allocated / token, held.samples


@pytest.mark.parametrize("name", EVICTING)
def test_no_more_than_budget_and_chunk_is_ever_held(name):
    """Looked at inside every layer, before it evicts. Storage too, but for what uneven heads waste: a tenth, or a lane."""
    valid, allocated, samples = most_held(name, num_hidden_layers=5)
    uniform = make(name, BUDGET).parts().allocator.uniform
    waste = 0 if uniform else max(LANE, (BUDGET + CHUNK) * (DENSE_WASTE - 1))
    assert valid <= BUDGET + CHUNK and allocated <= BUDGET + CHUNK + waste
    assert valid > BUDGET and samples >= 2 * 5 * (LENGTH // CHUNK)


@pytest.mark.parametrize("name", every_method())
def test_without_a_limit_chunks_change_nothing(name):
    """Logits and kept tokens of a padded batch at budget 1.0, in chunks and at once."""
    ids, mask = left_padded([90, 41])
    found = []
    for prefill in (Chunked(CHUNK), OneShot()):
        with compress(small_model(), make(name, 1.0, prefill=prefill)) as session:
            logits = session.prefill(ids, attention_mask=mask).logits
            found.append((logits, all_held(session), session.generate(5).tokens))
    assert (found[0][0] - found[1][0]).abs().max() <= 1e-5
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize("name", every_method(["SnapKV", "H2O"], short=["SnapKV"]))
def test_a_prompt_four_times_as_long_fits_where_one_at_once_does(name):
    """Peak memory of 8,192 tokens in chunks stays below that of 2,048 at once, with the same budget."""
    sizes = {"hidden_size": 512, "head_dim": 64, "intermediate_size": 1024, "num_hidden_layers": 2}
    model = small_model(groups=1, max_position_embeddings=8192, **sizes)
    growth = []
    for length, prefill in ((2048, OneShot()), (8192, Chunked(256))):
        with compress(model, make(name, 256, prefill=prefill)) as session, PeakMemory() as memory:
            session.prefill(random_ids(1, length))
        growth.append(memory.growth)
    assert growth[0] > 20 << 20, "enough to measure"
    assert growth[1] < growth[0]


@pytest.mark.parametrize("name", ["SnapKV", "KVzip"])
def test_a_sampler_sees_what_one_prompt_at_once_holds(name):
    """What the limit is checked with does find more where more is held."""
    with compress(small_model(), make(name, BUDGET)) as session, held_bytes(session) as held:
        session.prefill(random_ids(1, 100))
        token = session.cache.nbytes()["full"] // 100
    assert held.valid >= (100 if name == "KVzip" else 100 / 3) * token  # KVzip's layers wait for each other


def test_a_budget_that_is_no_number_of_tokens_is_refused():
    with pytest.raises(ValueError, match=r"budget=0\.5"):
        compare(small_model(), make("SnapKV", 0.5), 100, CHUNK)
    with pytest.raises(ValueError, match="length=30"):
        compare(small_model(), make("SnapKV", BUDGET), 30, CHUNK)


def test_the_command_prints_and_writes_what_was_measured(tmp_path, capsys):
    script = load_script("bench")
    out = tmp_path / "c.json"
    arguments = "chunked --model random/llama --methods SnapKV,KeyDiff --length 300 --budget 80 --chunk 40 --json"
    assert script.chunked(script.parse([*arguments.split(), str(out)])) == 0
    assert "SnapKV" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == ["SnapKV", "KeyDiff"]
    for row in rows:
        assert row["within"] and 80 / 120 * row["limit"] < row["chunked"]["held"]["valid"] <= row["limit"]
        assert row["off"] <= 1e-4 and row["chunked"]["seconds"] > 0
    with pytest.raises(ValueError, match="no method named Snap; valid: "):
        script.chunked(script.parse(["chunked", "--methods", "Snap"]))
    assert torch.get_num_threads() == 1
