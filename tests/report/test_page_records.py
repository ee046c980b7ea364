"""What a record says of readers of pages: bytes on the device when pages stand, the host's apart, and what tiers make of it."""

from __future__ import annotations

from functools import cache

import torch
from helpers import row_of
from small_models import random_ids, small_model

from kvcompress import compress
from kvcompress.measure import offload_cost_model
from kvcompress.methods import KIVI, FlexiCache, Full, Quest
from kvcompress.report.iso_bytes import kind
from kvcompress.sweep.aggregate import aggregate
from kvcompress.tracking.content import table

SIZE, TOKENS, STEPS = 16, 4080, 16
TOKEN = 2 * 16 * 4  # bytes of a key and a value of the small model


@cache
def wide():
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32}
    return small_model(num_hidden_layers=2, max_position_embeddings=8192, **sizes)


@torch.no_grad()
def told(method, tokens=TOKENS, steps=STEPS):
    """Record keys of one sample, what its cache held in the end, and the sample's row."""
    with compress(wide(), method) as session:
        session.prefill(random_ids(1, tokens))
        compressed = session.report()
        for t in range(steps):
            session.step(random_ids(1, 1, t))
        end = session.report()
        row = row_of(compressed, end)
        return aggregate([row]), session.cache.nbytes(), row


def test_stable_heads_hold_k_and_tail_pages_on_the_device_and_the_record_says_so():
    """4,096 tokens, K = 16 pages: device bytes with summaries and tables over the full cache's, all pages on the host."""
    found, held, row = told(FlexiCache(budget=16 * SIZE, heads="stable"))
    pages = 256  # of each head; none is new since the ranking at step 1, which saw as many
    expected = {
        "keys_values": 2 * 2 * 16 * SIZE * TOKEN,
        "positions": 2 * 4096 * 4,
        "summaries": 2 * 2 * pages * 2 * 16 * 4,
        "tables": 2 * 2 * pages * 8,
    }
    assert {name: held[name] for name in expected} == expected
    assert found["kv.moment"] == "decode" and found["kv.bytes_held"] == sum(expected.values())
    assert found["kv.bytes_summaries"] == expected["summaries"] and found["kv.bytes_tables"] == expected["tables"]
    assert found["kv.bytes_full"] == 2 * 2 * 4096 * TOKEN
    assert found["kv.ratio"] == found["kv.bytes_held"] / found["kv.bytes_full"] < 0.17
    assert found["kv.bytes_host"] >= 2 * 2 * 4096 * TOKEN and found["kv.kept_tokens_mean"] == 4096
    assert found["kv.bytes_held"] <= found["kv.bytes_allocated"] <= 1.25 * found["kv.bytes_held"]
    assert found["kv.bytes_mean"] == found["kv.bytes_held"] < found["kv.bytes_peak"], "the prompt's own cache was whole"
    assert row["out"]["compressed"]["kv"]["ratio"] > 1.0, "what the record would say if it looked before the pages"
    columns, lines = table([row])
    assert lines[0][columns.index("kv.bytes_held")] == found["kv.bytes_held"], "a tracker's table says the same"
    assert kind(found | {"parts.reader": "flexicache", "parts.scorer": "none"}) == "pages"


def test_a_reader_without_a_host_tier_holds_everything_and_the_bounds():
    found, held, _ = told(Quest(budget=256, skip_layers=0), 300, 5)
    assert found["kv.moment"] == "decode" and found["kv.bytes_host"] == 0
    full = 2 * 2 * 305 * TOKEN
    assert found["kv.bytes_held"] == full + 2 * 305 * 4 + 2 * 2 * 20 * (2 * 16 * 4 + 8) == held["valid"]
    assert found["kv.bytes_full"] == full and found["kv.ratio"] > 1.0


def test_what_holds_no_pages_is_measured_after_the_prompt_as_before():
    """The full cache; a reader over groups of codes, whose pages are each step's own; an answer without a step."""
    for method, steps in (
        (Full(), 5),
        (Quest(budget=64, skip_layers=0, codec=KIVI(group=16, residual=16)), 5),
        (Quest(budget=64, skip_layers=0), 0),
    ):
        found, _, row = told(method, 300, steps)
        assert found["kv.moment"] == "prompt" and found["kv.bytes_summaries"] == 0
        for name in ("bytes_held", "bytes_allocated", "bytes_full", "ratio", "bytes_host", "kept_tokens_mean"):
            assert found[f"kv.{name}"] == row["out"]["compressed"]["kv"][name]
        ends = [row["out"][moment]["kv"]["bytes_held"] for moment in ("compressed", "end")]
        assert found["kv.bytes_mean"] == sum(ends) / 2


def test_the_tier_model_takes_its_bytes_from_the_record():
    """Where offloading stops paying: a link as slow as `pays above` gives the full cache's time."""
    found, _, _ = told(FlexiCache(budget=4 * SIZE, heads="stable", rerank=2), 600, 12)
    one = {"method": "flexicache", "budget": 64, **found}
    lines = offload_cost_model.table([one], "h100-sxm", ["pcie5-x16"]).splitlines()
    cells = dict(zip(*([cell.strip() for cell in lines[i].split("|")[1:-1]] for i in (0, 2)), strict=True))
    assert float(cells["device MiB"]) == round(found["kv.bytes_held"] / 2**20, 2)
    assert float(cells["host MiB"]) == round(found["kv.bytes_host"] / 2**20, 2)
    wanted = offload_cost_model.break_even(
        found["kv.read_bytes_per_token"], found["kv.moved_bytes_per_token"], found["kv.bytes_full"], "h100-sxm"
    )
    assert found["kv.moved_bytes_per_token"] > 0 and float(cells["pays above, GB/s"]) == round(wanted / 1e9, 1)
