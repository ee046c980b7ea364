"""Constants lie on each device once: no decode step of a codec, scorer or reader copies host data there.

Stand-ins on the `meta` device take the place of tensors on a GPU: whatever comes from the host to meet them is seen.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import drawn_filters
from helpers import CODED, coded
from small_models import random_ids, small_model
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompress import compress
from kvcompress.common.constants import Constant, constant, flags, numbers
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.kernels.coded_rows import attend_rows
from kvcompress.method.codec import GroupedCodec, Slots
from kvcompress.methods import FlexiCache
from kvcompress.methods.flexicache import FlexiCacheReader
from kvcompress.methods.qfilters import FilterScorer
from kvcompress.models import compat

MODEL = small_model()
AWAY = torch.device("meta")


class HostData(TorchDispatchMode):
    """Notes what is made of host data: tensors of Python numbers, and copies from the CPU to another device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        there = isinstance(made, torch.Tensor) and made.device.type != "cpu"
        host = [x for x in args if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
        if "lift_fresh" in str(func) or (there and host):
            self.seen.append(str(func))
        return made


def test_the_watcher_sees_what_it_is_for():
    with HostData() as host:
        torch.tensor([1.0, 2.0])
        torch.ones(2).to(AWAY)
        torch.empty(2, device=AWAY).copy_(torch.ones(2))
        torch.ones(2) * 2.0 + torch.arange(2)
    assert len(host.seen) == 3


@pytest.mark.parametrize("name", CODED)
def test_no_decode_step_of_a_codec_brings_data_from_the_host(name):
    with compress(MODEL, coded(name)) as session:
        codec = session.compressor.parts.codec
    rotation = compat.rotations(MODEL)[0]
    draw = (torch.randn(1, 2, 32, 16, device=AWAY) for _ in range(2))
    keys, values = draw
    if isinstance(codec, GroupedCodec):
        codec.decode(codec.encode(keys, values, Slots(0, torch.zeros(1))), Slots(0, torch.zeros(1)))
        with HostData() as host:
            codec.decode(codec.encode(keys, values, Slots(0, torch.zeros(1))), Slots(0, torch.zeros(1)))
        assert host.seen == []
        return

    def slots(n, state, queries=None):
        at = torch.zeros(1, 1, n, dtype=torch.long, device=AWAY)
        return Slots(0, at, state, 2, torch.float32, queries, rotation=rotation, taken=at >= 0)

    state, q = {}, torch.randn(1, 4, 1, 16, device=AWAY)
    window = torch.randn(1, 4, 8, 16, device=AWAY), torch.zeros(1, 8, device=AWAY)
    channels = codec.encode(keys, values, slots(32, state, window if codec.needs.window else None))

    def step():
        codec.encode(keys[:, :, :1], values[:, :, :1], slots(1, state))
        query, rows = codec.query(q, slots(1, state)), codec.rows(channels, slots(32, state))
        if rows is not None:
            codec.expand(attend_rows(query, *rows, None, AttentionParams(0.25))[0], slots(1, state))
        read = codec.read(channels, slots(32, state))[1]
        codec.expand(query.new_zeros(1, 4, 1, read.shape[-1]), slots(1, state))
        codec.decode(channels, slots(32, state))

    step()  # constants come with the first
    with HostData() as host:
        step()
    assert host.seen == []


def test_no_score_of_filters_brings_them_from_the_host():
    scorer, view = (
        FilterScorer(drawn_filters(MODEL)),
        SimpleNamespace(keys=torch.randn(1, 2, 9, 16, device=AWAY), layer=1),
    )
    scorer.score(view, None, {})
    with HostData() as host:
        assert scorer.score(view, None, {}).shape == (1, 2, 9)
    assert host.seen == []


def test_no_choice_of_pages_makes_tensors_of_head_classes(monkeypatch):
    host, select = HostData(), FlexiCacheReader.select

    def watched(self, q, index, state):
        with host:
            return select(self, q, index, state)

    with compress(MODEL, FlexiCache(budget=8, page_size=4, rerank=2, heads="random", unstable=0.5)) as session:
        session.prefill(random_ids(1, 40))
        session.generate(4)
        monkeypatch.setattr(FlexiCacheReader, "select", watched)
        session.generate(4)
    assert host.seen == []


def test_a_constant_is_copied_once_to_each_device_and_type():
    held = Constant(torch.arange(3.0))
    assert held.on(AWAY) is held.on(AWAY) and held.on(torch.device("cpu")) is held.value
    assert held.on(torch.device("cpu"), torch.half) is held.like(torch.zeros(1).half())
    assert constant(numbers, (0, 1)) is constant(numbers, (0, 1))
    assert (
        constant(flags, (False, True)).value.dtype == torch.bool and constant(numbers, (0, 1)).value.dtype == torch.long
    )
