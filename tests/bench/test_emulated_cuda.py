"""The emulated CUDA device notices every fault that it is there for, and leaves torch as it was."""

from __future__ import annotations

import pytest
import torch

from kvcompress.bench.emulated_cuda import EmulatedCUDA
from kvcompress.bench.emulated_tensor import EmulatedTensor, HostWaits, MixedDevices, NotCapturable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="emulated where there is no GPU")


@pytest.fixture
def cuda():
    with EmulatedCUDA(devices=2) as found:
        yield found


WAITING = {
    "a number is read": lambda x: x.sum().item(),
    "a branch on a tensor": lambda x: bool((x > 0).any()),
    "a list": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "a mask as index": lambda x: x[x > 0],
    "values under a mask": lambda x: x.__setitem__(x > 0, x[:2].clone()),
    "a copy to the host": lambda x: x.cpu(),
    "a copy into a host tensor": lambda x: torch.zeros(4).copy_(x),
    "a pageable copy": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "a pinned copy that blocks": lambda x: torch.ones(4).pin_memory().to(x.device),
    "numbers of Python": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "a list as index": lambda x: x[[0, 2]],
    "an index on the CPU": lambda x: x[torch.tensor([0, 2])],
    "a CPU tensor copied into": lambda x: x.copy_(torch.ones(4)),
    "torch.equal": lambda x: torch.equal(x, x),
    "repeats of unknown length": lambda x: torch.repeat_interleave(x, torch.ones_like(x).long()),
    "the device is synchronised": lambda x: torch.cuda.synchronize(),
    "an event is synchronised": lambda x: torch.cuda.Event().synchronize(),
}
FREE = {
    "arithmetic": lambda x: x * 2 + 1.0,
    "a pinned copy": lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True),
    "made there": lambda x: torch.arange(4, device=x.device),
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
    "a number under a mask": lambda x: x.__setitem__(x > 0, 0.0),
    "slices": lambda x: x[1:3].clone(),
    "an index there": lambda x: x[torch.arange(2, device=x.device)],
    "topk": lambda x: x.topk(2).indices,
}


@pytest.mark.parametrize("name", WAITING)
def test_the_host_may_not_wait_in_a_fixed_step_nor_in_a_capture(cuda, name):
    x = cuda.put(torch.tensor([1.0, -1.0, 2.0, -2.0]))
    with cuda.fixed(), pytest.raises(HostWaits, match="waits inside a step"):
        WAITING[name](x)
    with pytest.raises(NotCapturable, match="stream is capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        WAITING[name](x)
    torch.cuda.set_stream(torch.cuda.default_stream())
    if "synchronised" not in name or "event" in name:
        WAITING[name](x)
        assert cuda.account.waits


@pytest.mark.parametrize("name", FREE)
def test_what_stays_on_the_device_is_free_and_right(cuda, name):
    x = cuda.put(torch.tensor([1.0, -1.0, 2.0, -2.0]))
    with cuda.fixed():
        found = FREE[name](x)
    expected = FREE[name](torch.tensor([1.0, -1.0, 2.0, -2.0])) if "pinned" not in name else torch.ones(4)
    assert not cuda.account.waits
    if isinstance(found, torch.Tensor):
        assert isinstance(found, EmulatedTensor) and torch.equal(found.held, expected.as_subclass(torch.Tensor))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(4),
        lambda x: torch.cat([x, torch.ones(4)]),
        lambda x: torch.ones(4)[x.long().clamp(0, 3)],
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: x.__setitem__(slice(None, 2), torch.ones(2).to("cuda:1")[:2] + x[:2]),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x.view(1, 1, 2, 2), *2 * [torch.ones(1, 1, 2, 2)]),
        lambda x: torch.where(x > 0, x, x.to("cuda:1")),
    ],
)
def test_devices_are_not_mixed(cuda, mix):
    with pytest.raises(MixedDevices):
        mix(cuda.put(torch.tensor([1.0, -1.0, 2.0, -2.0])))


def test_a_graph_does_again_what_was_launched_on_the_same_memory(cuda):
    x, y = cuda.put(torch.tensor([1.0, 2.0])), cuda.put(torch.zeros(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = x * 3
        y.add_(z)
    x.copy_(cuda.put(torch.tensor([5.0, 6.0])))
    graph.replay()
    assert z.held.tolist() == [15, 18] and y.held.tolist() == [18, 24]


def test_work_on_another_device_is_no_part_of_a_capture(cuda):
    x = cuda.put(torch.ones(2), "cuda:1")
    with pytest.raises(NotCapturable, match="the capture is on cuda:0"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + 1


def test_work_on_a_side_stream_is_late_until_it_is_waited_for(cuda):
    x, side, event = cuda.put(torch.zeros(2)), torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        x.add_(1)
        event.record(side)
    assert (x * 1).held.tolist() == [0, 0]
    torch.cuda.current_stream().wait_event(event)
    assert (x * 1).held.tolist() == [1, 1]


def test_launches_bytes_and_copies_are_counted(cuda):
    x = cuda.put(torch.zeros(8, 4))
    cuda.account.clear()
    (x + x.expand(8, 4)).view(4, 8)
    x.index_select(0, cuda.put(torch.tensor([1, 2])))
    torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    assert dict(cuda.account.launches) == {"add": 1, "index_select": 1} and cuda.account.copies == 1
    assert cuda.account.moved == 3 * 128 + 2 * 32


def test_torch_is_as_it_was_afterwards():
    before = torch.cuda.Stream, torch.cuda.synchronize, torch.cuda.is_available()
    with EmulatedCUDA():
        assert torch.cuda.is_available()
    assert before == (torch.cuda.Stream, torch.cuda.synchronize, torch.cuda.is_available())
    assert not isinstance(torch.ones(2) + 1, EmulatedTensor)
