"""Decode steps with fixed shapes leave what eager steps leave, and pick the same tokens."""

from __future__ import annotations

import io
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from helpers import EVICTING, grid, make, thinned
from hydra import compose, initialize_config_dir
from rich.console import Console
from small_models import ARCHITECTURES, HYBRID, LATENT, left_padded, random_ids, small_model

import kvcompress.conf
from kvcompress import compress
from kvcompress.bench.emulated_cuda import EmulatedCUDA
from kvcompress.cache.layouts.dense import rounded
from kvcompress.hook import static_decode
from kvcompress.hook.fixed import choice
from kvcompress.methods import H2O, KIVI, AdaKV, Full, KVzip, Quest, SnapKV
from kvcompress.sweep import config
from kvcompress.sweep.launcher.scheduler import Scheduler

CONF = Path(kvcompress.conf.__file__).resolve().parent

FULL_ATTENTION = [name for name in ARCHITECTURES if name not in HYBRID]
NEW = 9
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def run(model, method, decode, ids, mask=None, new=NEW, **options):
    """Tokens, logits and the cache of a generation."""
    seen = []
    with compress(model, method, decode=decode) as session:
        session.prefill(ids, attention_mask=mask)
        found = session.generate(new, watch=lambda: seen.append(session.cache.logits.clone()), **options)
        return found, torch.stack(seen), session.cache, session.report()


def assert_same(eager, other, exact=True):
    assert other[0].tokens == eager[0].tokens and other[0].finished == eager[0].finished
    assert torch.allclose(other[1], eager[1], atol=1e-4)
    ours, theirs = other[2], eager[2]
    assert torch.equal(ours.real, theirs.real) and ours.get_seq_length() == theirs.get_seq_length()
    assert ours.sequence.kept_max == theirs.sequence.kept_max and torch.equal(ours.kept_tokens(), theirs.kept_tokens())
    for layer in range(len(ours.layers)):
        positions = ours.positions(layer)
        assert torch.equal(positions, theirs.positions(layer))
        for a, b in zip(ours.keys_values(layer), theirs.keys_values(layer), strict=True):
            a, b = (x.masked_fill((positions < 0)[..., None], 0.0) for x in (a, b))
            assert torch.equal(a, b) if exact and layer == 0 else torch.allclose(a, b, atol=1e-4)
    for kind in ("valid", "keys_values", "positions", "full"):
        assert ours.nbytes()[kind] == theirs.nbytes()[kind]


@pytest.mark.parametrize(("architecture", "budget"), thinned(FULL_ATTENTION, [1.0, 0.4], every=2))
def test_a_static_step_equals_the_eager_one_in_every_architecture(architecture, budget):
    model, ids = small_model(architecture), random_ids(1, 30)
    method = SnapKV(budget=budget, window=3)
    eager, static = run(model, method, "eager", ids), run(model, method, "static", ids)
    assert static[3]["step"]["how"] == "static" and eager[3]["step"]["how"] == "eager"
    assert_same(eager, static)


def fits(name):
    """True if no step evicts, and heads hold equally much."""
    parts = make(name, 0.25).parts()
    return not parts.schedule.in_decode and parts.allocator.uniform


@pytest.mark.parametrize("name", [name for name in EVICTING if fits(name)])
def test_what_any_method_kept_is_decoded_the_same(name):
    model, ids = small_model(), random_ids(1, 40)
    method = make(name, 0.25)
    assert_same(run(model, method, "eager", ids), run(model, method, "static", ids))


@pytest.mark.parametrize(("lengths", "budget"), [([20, 17, 19], 1.0), ([20, 9, 14], 7), ([20, 18, 18], 0.5)])
def test_padded_rows_that_end_at_different_steps_are_as_in_the_eager_step(lengths, budget):
    model = small_model()
    ids, mask = left_padded(lengths)

    def until(tokens):  # rows end at different steps, and go on as padding
        return len(tokens) >= 2 and tokens[-1] % 3 == 0

    method = SnapKV(budget=budget, window=3)
    eager = run(model, method, "eager", ids, mask, until=until)
    assert len({len(tokens) for tokens in eager[0].tokens}) > 1
    assert_same(eager, run(model, method, "static", ids, mask, until=until))


def test_what_follows_goes_on_from_a_fixed_step_as_from_an_eager_one():
    model, ids = small_model(), random_ids(1, 30)
    more, found = random_ids(1, 5, seed=3), []
    for decode in ("eager", "static"):
        with compress(model, SnapKV(budget=0.4, window=3), decode=decode) as session:
            session.prefill(ids)
            session.generate(6)
            fork = session.cache.fork()
            appended = session.append(more)
            tokens = session.generate(5).tokens
            session.prefill(more, cache=session.cache)
            last = session.generate(4).tokens
            session.cache = fork
            found.append((appended, session.generate(7).tokens, tokens, last))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4)
    assert found[0][1:] == found[1][1:]


def test_a_cache_is_not_stepped_with_the_step_of_another(monkeypatch):
    model, found, inner = small_model(), [], static_decode.StaticDecodeStep
    monkeypatch.setattr(
        "kvcompress.hook.stepper.StaticDecodeStep", lambda model, forms, how: inner(model, forms, "static")
    )
    for decode in ("eager", "auto"):
        with compress(model, AdaKV(budget=20, window=3), decode=decode) as session:
            session.prefill(random_ids(1, 12))  # shorter than the budget: dense
            session.generate(3)
            fits = session.cache
            session.prefill(random_ids(1, 60))
            session.generate(3)
            ragged, logits = session.cache, []
            for cache in (fits, ragged, fits, ragged):
                session.cache = cache
                logits.append(session.step(torch.tensor([[7]])))
            found.append((torch.stack(logits), fits.kept_tokens(), ragged.kept_tokens()))
    assert all(torch.allclose(a.float(), b.float(), atol=1e-4) for a, b in zip(*found, strict=True))


def test_buffers_that_have_been_replaced_are_freed_with_the_append_that_replaces_them():
    with compress(small_model(), Full(), decode="static") as session:
        session.prefill(random_ids(1, 30))
        session.generate(4)
        before = weakref.ref(session.cache.full_layers[0].store.channels["keys"])
        session.append(random_ids(1, 90))
        assert before() is None
        session.generate(4)
        before = weakref.ref(session.cache.full_layers[0].store.channels["keys"])
    session.cache = None
    assert before() is None


def test_a_closed_session_takes_no_step_and_several_tokens_go_as_in_the_eager_step():
    model, found = small_model(), []
    for decode in ("eager", "static"):
        with compress(model, Full(), decode=decode) as session:
            session.prefill(random_ids(1, 30))
            session.generate(3)
            session.step(random_ids(1, 2, seed=1))
            found.append((session.step(torch.tensor([[7]])), session.cache.get_seq_length()))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4) and found[0][1] == found[1][1]
    for work in (lambda: session.step(torch.tensor([[7]])), lambda: session.prepare(3)):
        with pytest.raises(ValueError, match="the session is closed"):
            work()


def test_steps_without_a_generation_make_room_as_they_come():
    model, ids = small_model(), random_ids(2, 30)
    logits = []
    for decode in ("eager", "static"):
        with compress(model, Full(), decode=decode) as session:
            token = session.prefill(ids).logits.argmax(-1)
            for _ in range(fixed_steps := 70):
                token = session.step(token[:, None]).argmax(-1)
            logits.append(session.cache.logits)
            assert session.cache.get_seq_length() == 30 + fixed_steps
    assert torch.allclose(*logits, atol=1e-4)


def test_what_is_allocated_is_one_of_few_capacities_and_counted():
    assert all(rounded(rounded(n)) == rounded(n) for n in range(1, 5000))
    assert all(n <= rounded(n) <= max(n + 64, n * 1.125) for n in range(1, 5000))
    assert len({rounded(n) for n in range(512, 1024)}) <= 9
    model, ids = small_model(), random_ids(1, 30)
    held = run(model, Full(), "static", ids)[2].nbytes()
    width = 3 * 2 * 2 * 16 * 4 + 3 * 4  # keys and values of three layers, and one position in each
    assert held["allocated"] == rounded(30 + NEW) * width and held["valid"] == (30 + NEW - 1) * width


REFUSED = {
    "codec=kivi": (KIVI(group=16), "llama"),
    "reader=quest": (Quest(budget=0.5), "llama"),
    "sliding_attention": (Full(), "gemma2"),
    "latents": (Full(), LATENT[0]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_decoded_so_is_refused_by_name_before_any_work(reason):
    method, architecture = REFUSED[reason]
    model = small_model(architecture)
    with pytest.raises(ValueError, match=reason):
        compress(model, method, decode="static")
    eager, auto = (run(model, method, decode, random_ids(1, 20), new=4) for decode in ("eager", "auto"))
    assert auto[0].tokens == eager[0].tokens
    assert auto[3]["step"]["how"] == "eager" and reason in auto[3]["step"]["why"]


def test_rows_too_different_to_be_padded_are_refused_when_they_are_known():
    model = small_model()
    ids, mask = left_padded([60, 6, 6, 6])
    with compress(model, H2O(budget=0.5), decode="static") as session:
        session.prefill(ids, attention_mask=mask)
        with pytest.raises(ValueError, match="decode=static.*very different numbers of tokens.*decode=eager"):
            session.generate(3)


@torch.no_grad()
def test_a_step_that_cannot_be_captured_is_refused_and_memory_that_does_not_do_is_not_called_that(monkeypatch):
    model = small_model()
    with compress(model, SnapKV(budget=8, window=4)) as session:
        session.prefill(random_ids(1, 20))
        layers = session.cache.full_layers
        forms = choice.forms(layers, session.compressor, 4)
        for fault, raised, words in (
            (
                RuntimeError("operation not permitted when stream is capturing\nmore"),
                static_decode.CompileError,
                "not permitted",
            ),
            (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "out of memory"),
        ):
            monkeypatch.setattr(static_decode, "captured", lambda *args, fault=fault: (_ for _ in ()).throw(fault))
            with pytest.raises(raised, match=words):
                static_decode.StaticDecodeStep(model, forms, "graph")


def test_unknown_ways_and_a_graph_without_its_device_are_refused():
    with pytest.raises(ValueError, match="decode='fast'; valid: eager, static, compiled, graph, auto"):
        compress(small_model(), Full(), decode="fast")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        compress(small_model(), Full(), decode="graph")


def test_a_cell_says_in_its_record_how_it_stepped_and_has_an_id_of_its_own(tmp_path):
    common = [
        "model=random",
        "task=needle",
        "task.lengths=[512]",
        "task.depths=[0.5]",
        "task.n_seeds=1",
        "task.max_new_tokens=5",
    ]
    config.register()
    records = {}
    for decode, method in (("eager", "snapkv"), ("static", "snapkv"), ("auto", "quest")):
        arguments = [*common, f"method={method}", "budget=0.5", f"decode={decode}", f"paths.results={tmp_path}"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            outcome = Scheduler(Console(file=io.StringIO()))(compose("config", arguments))
        assert outcome.status == "ok", outcome.note
        records[decode] = outcome.record
    assert [records[decode]["protocol.step"] for decode in records] == ["eager", "static", "eager"]
    assert records["static"]["run_id"] != records["eager"]["run_id"] and records["static"]["time.step_ready_s"] > 0
    assert "reader=quest" in records["auto"]["protocol.step_why"]
    assert records["static"]["score"] == records["eager"]["score"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        outcome = Scheduler(Console(file=io.StringIO()))(compose("config", [*common, "method=full", "decode=fast"]))
    assert outcome.status == "refused" and "decode='fast'" in outcome.note


@needs_compiler
@pytest.mark.parametrize("architecture", grid(["llama", "qwen2"], short=["llama"].__contains__))
def test_a_compiled_step_equals_the_eager_one_and_is_made_once_per_capacity(architecture, monkeypatch):
    options = {"use_sliding_window": False} if architecture == "qwen2" else {}
    model, made = small_model(architecture, num_hidden_layers=1, **options, fresh=True), []
    inner = static_decode._compile
    monkeypatch.setattr(static_decode, "_compile", lambda *args: made.append(1) or inner(*args))
    shapes = set()  # where all heads of a layer keep the same, their positions are held once
    for length in (30, 41):
        ids = random_ids(1, length, seed=length)
        method = SnapKV(budget=0.5, window=3)
        eager, compiled = run(model, method, "eager", ids), run(model, method, "compiled", ids)
        assert compiled[3]["step"]["how"] == "compiled" and compiled[3]["step"]["ready_s"] > 0
        assert_same(eager, compiled, exact=False)
        shapes.add(tuple(layer.store.channels["positions"].shape for layer in compiled[2].full_layers))
    assert len(made) == len(shapes)
    run(model, method, "compiled", ids)
    assert len(made) == len(shapes)


def test_a_forward_that_cannot_be_traced_is_refused_by_name_and_auto_goes_on_eagerly(monkeypatch):
    model, ids = small_model(fresh=True), random_ids(1, 20)  # a step is known by its model

    def fault(*args):
        raise RuntimeError("data-dependent\nmore of it")

    monkeypatch.setattr(static_decode, "_compile", fault)
    with pytest.raises(ValueError, match="decode=compiled: the step of 'llama' cannot be compiled .*data-dependent"):
        run(model, Full(), "compiled", ids)
    auto = run(model, Full(), "auto", ids)
    assert auto[0].tokens == run(model, Full(), "eager", ids)[0].tokens
    assert auto[3]["step"]["how"] == "eager" and "data-dependent" in auto[3]["step"]["why"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="emulated where there is no GPU")
def test_a_captured_step_reads_what_is_written_into_its_tensors():
    with EmulatedCUDA() as cuda:
        source = cuda.put(torch.ones(3))
        replay = static_decode.captured(lambda: source * 2, source.device)
        first = replay()
        source.fill_(5.0)
        second = replay()
        assert first.held.tolist() == [2.0] * 3 and second.held.tolist() == [10.0] * 3  # the first is not written over
        assert cuda.account.launches["graph"] == 2


def test_a_method_that_repeats_the_prompt_knows_tokens_of_static_steps_in_the_next_turn():
    model, ids, later = small_model(), random_ids(1, 30), random_ids(1, 9, 1)

    class Tokenizer:
        def encode(self, text, add_special_tokens=False):
            return [5, 6]

    found = []
    for decode in ("eager", "static"):
        with compress(model, KVzip(budget=0.5), tokenizer=Tokenizer(), decode=decode) as session:
            session.prefill(ids)
            session.generate(NEW)
            session.prefill(later, cache=session.cache)
            found.append([session.cache.positions(layer).tolist() for layer in range(len(session.cache.layers))])
    assert found[0] == found[1]
