"""Sessions on emulated GPUs give the CPU's tokens, on whatever device, and what a card cannot run falls back by name."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from helpers import grid
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.bench.emulated_cuda import EmulatedCUDA, TritonLaunch
from kvcompress.bench.emulated_tensor import EmulatedTensor
from kvcompress.kernels import launch, triton_decode
from kvcompress.methods import H2O, KIVI, TOVA, AdaKV, DuoAttention, FlexiCache, Full, Int8, Quest, SnapKV, TurboQuant

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="emulated where there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

HALF = torch.bfloat16
NEW = 4
METHODS = {
    "full": Full(),
    "snapkv": SnapKV(budget=10, window=4),
    "adakv": AdaKV(budget=12, window=3),
    "h2o": H2O(budget=10),
    "tova": TOVA(budget=10),
    "kivi": KIVI(bits=4, group=8, residual=8),
    "int8": Int8(),
    "adakv int8": AdaKV(budget=12, window=3, codec=Int8()),
    "turboquant": TurboQuant(bits=3),
    "quest": Quest(budget=16, page_size=16, skip_layers=0),
    "duo": DuoAttention(budget=0.5, heads="random", sinks=2, window=4),
    "flexicache": FlexiCache(budget=16, page_size=16, heads="random", rerank=2),
}


def model_of(dtype=torch.float32, layers=1):
    return small_model(num_hidden_layers=layers, fresh=True).to(dtype)


def padded():
    """Rows of different lengths, whose heads hold different numbers."""
    ids, mask = left_padded([40, 25])
    return {"ids": ids, "mask": mask}


def run(method, ids, cuda=None, device="cuda:0", decode="eager", dtype=torch.float32, mask=None):
    """Tokens, logits and report of a generation."""
    model = model_of(dtype)
    if cuda is not None:
        cuda.place(model, device)
        ids = cuda.put(ids, device)
    logits = []
    with compress(model, method, decode=decode) as session:
        session.prefill(ids, attention_mask=mask)
        found = session.generate(NEW, watch=lambda: logits.append(session.cache.logits))
        logits = [x.held if isinstance(x, EmulatedTensor) else x for x in logits]
        return found.tokens, torch.stack(logits).float(), session.report()


@pytest.mark.parametrize("name", grid(METHODS, short=lambda name: name in ("adakv", "kivi", "quest", "int8")))
def test_the_second_gpu_gives_the_tokens_of_the_cpu(name):
    """Everything is launched on the device of the model, though another is current."""
    fed = padded() if name.startswith("adakv") else {"ids": random_ids(1, 40)}
    dtype = HALF if name == "kivi" else torch.float32  # whose kernel takes half precision
    tokens, logits, _ = run(METHODS[name], **fed, dtype=dtype)
    with EmulatedCUDA(devices=2) as cuda:
        found, there, report = run(METHODS[name], **fed, cuda=cuda, device="cuda:1", dtype=dtype)
        assert cuda.launched[torch.device("cuda:0")] == 0
    assert found == tokens and (there - logits).abs().max() <= (0.1 if dtype == HALF else 1e-4)
    assert ("triton" in report["kernel"]) == (name not in ("full", "snapkv", "h2o", "tova"))


def test_mass_in_half_precision_is_the_kernels_and_wider_types_the_blocks():
    ids = random_ids(1, 40)
    for dtype, kernel in ((HALF, "sdpa+triton"), (torch.float32, "blockwise")):
        tokens, _, _ = run(H2O(budget=16, decode=False), ids, dtype=dtype)
        with EmulatedCUDA(devices=2) as cuda:
            found, _, report = run(H2O(budget=16, decode=False), ids, cuda, "cuda:1", dtype=dtype)
        assert found == tokens and set(kernel.split("+")) <= set(report["kernel"].split("+"))
        assert ("triton" in report["kernel"]) == (dtype == HALF)


def test_a_step_is_captured_on_the_models_own_device():
    ids = random_ids(1, 30)
    tokens, logits, _ = run(SnapKV(budget=10, window=4), ids)
    with EmulatedCUDA(devices=2) as cuda:
        found, there, report = run(SnapKV(budget=10, window=4), ids, cuda, "cuda:1", "graph")
        assert cuda.account.launches["graph"] == NEW - 1 and cuda.launched[torch.device("cuda:0")] == 0
        assert torch.cuda.current_device() == 0
    assert found == tokens and (there - logits).abs().max() <= 1e-4 and report["step"]["how"] == "graph"


def test_after_a_failed_capture_the_stream_is_the_one_before(monkeypatch):
    """torch leaves the stream of the capture current where it fails; `auto` goes on with eager steps."""
    from kvcompress.hook import static_decode

    stock = static_decode.step

    def reads(model, forms, ids, *rest):
        if torch.cuda.current_stream() is not torch.cuda.default_stream() and cuda.capturing:
            ids.tolist()
        return stock(model, forms, ids, *rest)

    monkeypatch.setattr(static_decode, "step", reads)
    tokens, _, _ = run(Full(), random_ids(1, 12))
    with EmulatedCUDA() as cuda:
        found, _, report = run(Full(), random_ids(1, 12), cuda, decode="auto")
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert found == tokens and report["step"]["how"] == "eager" and "cannot be captured" in report["step"]["why"]


def test_a_kernel_that_does_not_fit_the_card_is_not_taken():
    """The same sums by torch, under another name; nothing is compiled."""
    tokens, _, _ = run(METHODS["adakv"], **padded())
    with EmulatedCUDA(shared_memory=2048) as cuda:
        found, _, report = run(METHODS["adakv"], **padded(), cuda=cuda)
        assert not cuda.account.launches["partial_sums"]
    assert found == tokens and report["kernel"] == "lanes+sdpa"


def test_what_triton_refuses_is_told_once_and_done_by_torch(monkeypatch):
    from triton.runtime.errors import OutOfResources

    def refuse(self, grid):
        def launch(*args, **sizes):
            tried.append(self.name)
            raise OutOfResources(300_000, 232_448, "shared memory")

        return launch

    tried = []
    tokens, _, _ = run(METHODS["adakv"], **padded())
    monkeypatch.setattr(TritonLaunch, "__getitem__", refuse)
    with EmulatedCUDA() as cuda, pytest.warns(UserWarning, match="lanes, float32.*out of resource") as told:
        found, _, report = run(METHODS["adakv"], **padded(), cuda=cuda)
    assert found == tokens and report["kernel"] == "lanes+sdpa"
    assert len(tried) == 1 and len([w for w in told if "Triton kernel" in str(w.message)]) == 1


def test_other_errors_than_tritons_are_raised():
    with EmulatedCUDA() as cuda, pytest.raises(ValueError, match="a fault"):  # noqa: PT012
        with launch.launching("lanes", cuda.put(torch.ones(1)), 16):
            raise ValueError("a fault")


@pytest.mark.parametrize(
    ("dtype", "dim", "taken"),
    [(HALF, 128, True), (torch.float32, 128, True), (torch.float64, 128, False), (HALF, 2048, False)],
)
def test_lanes_are_taken_by_type_and_width(dtype, dim, taken):
    with EmulatedCUDA() as cuda:
        q = cuda.put(torch.zeros(1, 8, 1, dim, dtype=dtype))
        k = cuda.put(torch.zeros(3, 64, dim, dtype=dtype))
        assert triton_decode.usable(q, k, k, 2) == taken


def test_promoted_pages_are_waited_for_before_a_pool_grows_or_is_read():
    """Pages under way on a side stream are in before anything else is done with their pool."""
    ids = random_ids(1, 60)
    method, number = FlexiCache(budget=16, page_size=8, heads="random", rerank=2), 12

    def steps(cuda=None):
        model = model_of()
        fed, more = random_ids(1, number, 3), random_ids(1, 20, 4)
        if cuda is not None:
            cuda.place(model)
            fed, more = cuda.put(fed), cuda.put(more)
        with compress(model, method) as session:
            session.prefill(ids if cuda is None else cuda.put(ids))
            found = [session.step(fed[:, i : i + 1]) for i in range(number)]
            found.append(session.append(more))
        return torch.cat([x.held if isinstance(x, EmulatedTensor) else x for x in found])

    expected = steps()
    with EmulatedCUDA(triton="interpret") as cuda:
        assert (steps(cuda) - expected).abs().max() <= 1e-4


def test_time_is_taken_on_the_models_device_and_few_events_are_held():
    with EmulatedCUDA(devices=2) as cuda:
        model = cuda.place(model_of(), "cuda:1")
        with compress(model, TOVA(budget=10)) as session:
            session.prefill(cuda.put(random_ids(1, 30), "cuda:1"))
            session.generate(12)
            clock = session.compressor.stats.clock
            assert len(clock._events) <= 1 and clock.seconds > 0


def test_h2o_without_decode_wants_no_weights_in_decode_and_steps_can_be_fixed():
    ids = random_ids(1, 30)
    found = []
    for decode in ("eager", "static"):
        with compress(small_model(), H2O(budget=10, decode=False), decode=decode) as session:
            session.prefill(ids)
            found.append(session.generate(NEW).tokens)
            assert session.report()["step"]["how"] == decode and "sdpa" in session.report()["kernel"]
            if decode == "eager":
                assert not session.compressor.wants_probabilities and session.compressor.wants_weights("prompt")
    assert found[0] == found[1]


def test_a_channel_is_shown_when_its_pages_are_in():
    from kvcompress.cache.layouts import PagedStore

    with EmulatedCUDA() as cuda:
        keys = torch.randn(64, 4)
        at = torch.arange(32, dtype=torch.int32).repeat(2)
        packed = {name: cuda.put(x.clone()) for name, x in (("keys", keys), ("values", keys), ("positions", at))}
        store = PagedStore(packed, torch.full((1, 2), 32), packed["keys"], 8, True, (0, 1))
        store.hold(torch.tensor([[[0], [1]]]))
        store.hold(torch.tensor([[[2, 3], [2, 3]]]))  # promoted on a stream of their own
        assert torch.equal(store.get("keys").held.flatten(0, 2), keys)
