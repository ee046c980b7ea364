"""The store of chunks: what comes out is what went in, or nothing; whatever happens to files, disks and processes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from small_models import CharacterTokenizer, small_model

from kvcompress.method.parts import Plain
from kvcompress.methods import KIVI
from kvcompress.reuse import disk_tier
from kvcompress.reuse.kv_store import Damaged, KVStore, store_of
from kvcompress.reuse.model_identity import identity, tokens

FORK = multiprocessing.get_context("fork")
LAYERS, HEADS, SIZE = 3, 2, 16


def rows(n=6, seed=0, layers=LAYERS, dtype=torch.float32):
    """Keys and values of a chunk, per layer."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(1, HEADS, n, SIZE, generator=generator).to(dtype) for _ in range(2 * layers)]
    return made[:layers], made[layers:]


def put(store, number=0, n=6, **more):
    """A chunk told by its number."""
    keys, values = rows(n, number, dtype=getattr(torch, store.identity["dtype"]))
    return store.put(ids_of(number, n), keys, values, **more)


def ids_of(number, n=6):
    return [number + 2] * n


def holds(chunk, number=0, n=6):
    keys, values = rows(n, number)
    for index in range(LAYERS):
        k, v = chunk.layer(index)
        assert torch.equal(k, keys[index]) and torch.equal(v, values[index])
    assert chunk.ids.tolist() == ids_of(number, n) and len(chunk) == n
    return True


def file_of(store, number=0, **more):
    return store.disk.path(store.key(ids_of(number), **more))


ENTRY = 2 * LAYERS * HEADS * 6 * SIZE * 4


@pytest.fixture(scope="module")
def model():
    return small_model(fresh=True)  # a model has stores of its own


# ---------------------------------------------------------------------- both tiers


@pytest.mark.parametrize("memory", [0, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_comes_out_of_either_tier_is_what_went_in(tmp_path, memory, dtype):
    model = small_model(fresh=True).to(dtype)
    keys, values = rows(dtype=dtype)
    store = KVStore(model, memory, tmp_path)
    assert store.get([1, 2, 3, 4, 5, 6]) is None
    made = store.put([1, 2, 3, 4, 5, 6], keys, values)
    for chunk in (made, store.get([1, 2, 3, 4, 5, 6]), KVStore(model, memory, tmp_path).get(torch.arange(1, 7))):
        for index in (2, 0, 1):
            k, v = chunk.layer(index)
            assert torch.equal(k, keys[index]) and torch.equal(v, values[index]) and k.dtype == dtype
        assert chunk.nbytes == sum(t.nbytes for t in (*keys, *values))


def test_a_chunk_is_told_by_its_ids_what_it_stood_behind_and_the_form_of_its_keys(model):
    store = KVStore(model)
    put(store, lead=[1])
    assert store.get(ids_of(0), lead=[1]) is not None
    assert store.get(ids_of(0)) is None and store.get(ids_of(0), lead=[2]) is None
    assert store.get(ids_of(0)[:-1], lead=[1]) is None and store.get(ids_of(0), lead=[1], form="rotated") is None
    assert store.key([1], lead=[2, 3]) != store.key([3], lead=[1, 2]) != store.key([1, 2, 3])
    assert (store.stats.hits, store.stats.misses) == (1, 4)


def test_what_is_put_is_copied_and_holds_no_larger_tensor_alive(model):
    store, whole = KVStore(model), torch.randn(1, HEADS, 600, SIZE)
    part = whole[:, :, 3:9]
    chunk = store.put(ids_of(0), [part] * LAYERS, [part] * LAYERS)
    kept = part.clone()
    whole.zero_()
    assert torch.equal(chunk.layer(1)[0], kept)
    assert chunk.layer(1)[0].untyped_storage().nbytes() == kept.nbytes


def test_hits_bytes_and_times_are_counted(model, tmp_path):
    store = KVStore(model, 1 << 20, tmp_path)
    put(store)
    before = store.stats.copy()
    chunk = store.get(ids_of(0))
    [chunk.layer(index) for index in range(LAYERS)]
    found = store.stats.since(before)
    assert found["memory_hits"] == 1 and found["bytes_loaded"] == ENTRY and found["bytes_from_disk"] == 0
    store.forget()
    before = store.stats.copy()
    chunk = store.get(ids_of(0))
    chunk.layer(1)
    found = store.stats.since(before)
    assert found["memory_hits"] == 0 and found["bytes_from_disk"] == ENTRY // LAYERS and found["load_s"] > 0
    assert store.bytes_in_memory == 0  # not before all of it was read
    [chunk.layer(index) for index in range(LAYERS)]
    assert store.bytes_in_memory == ENTRY and store.stats.since(before)["bytes_from_disk"] == ENTRY
    assert store.get(ids_of(0)).layer(0) is not None and store.stats.memory_hits == 2


class Rounding:
    """A codec in groups of four tokens: numbers in steps of a 16th, one byte each."""

    name, group = "rounding", 4

    def __repr__(self):
        return "Rounding()"

    def encode_keys(self, x):
        assert x.shape[2] % self.group == 0
        return {"codes": (16 * x).round().clamp(-128, 127).to(torch.int8)}

    def decode_keys(self, channels):
        return channels["codes"].float() / 16

    encode_values, decode_values = encode_keys, decode_keys


@pytest.mark.parametrize("n", [3, 4, 6, 8])
def test_chunks_stored_as_codes_take_fewer_bytes_and_come_back_as_the_codec_decodes_them(model, tmp_path, n):
    codec, (keys, values) = Rounding(), rows(n)
    store, plain = KVStore(model, 1 << 20, tmp_path, codec=codec), KVStore(model, 1 << 20, tmp_path)
    made = store.put(ids_of(0, n), keys, values)
    assert plain.get(ids_of(0, n)) is None  # neither takes the other's
    whole = n // 4 * 4
    for chunk in (made, store.get(ids_of(0, n)), KVStore(model, 0, tmp_path, codec=codec).get(ids_of(0, n))):
        for index in range(LAYERS):
            for found, given in zip(chunk.layer(index), (keys[index], values[index]), strict=True):
                coded = codec.decode_keys(codec.encode_keys(given[:, :, :whole]))
                assert torch.equal(found, torch.cat([coded, given[:, :, whole:]], dim=2))
        assert chunk.nbytes == 2 * LAYERS * HEADS * SIZE * (whole + 4 * (n - whole))


def test_kivi_holds_chunks_in_few_bytes_near_to_what_they_were():
    model = small_model(head_dim=32, hidden_size=128)
    generator = torch.Generator().manual_seed(0)
    keys, values = ([torch.randn(1, 2, 70, 32, generator=generator) for _ in range(3)] for _ in range(2))
    exact, found = KVStore(model).put([5] * 70, keys, values), {}
    for bits in (2, 4, 8):
        store = KVStore(model, codec=KIVI(bits=bits, group=32, residual=32).make_codec())
        chunk = store.put([5] * 70, keys, values)
        off = [
            (a - b).square().mean().sqrt()
            for i in range(3)
            for a, b in zip(chunk.layer(i), exact.layer(i), strict=True)
        ]
        found[bits] = max(map(float, off)), chunk.nbytes / exact.nbytes
        assert all(torch.equal(chunk.layer(i)[0][:, :, 64:], keys[i][:, :, 64:]) for i in range(3))
    assert found[2][0] > 2 * found[4][0] > 4 * found[8][0] > 0
    assert found[2][1] < 0.25 and found[4][1] < 0.3 and found[8][1] < 0.45


def test_a_codec_that_needs_more_than_a_chunk_is_refused_by_name(model):
    with pytest.raises(ValueError, match="cannot be stored as plain: a store takes a codec that works in groups"):
        KVStore(model, codec=Plain())


# ---------------------------------------------------------------------- limits


def test_memory_holds_no_more_bytes_than_its_limit_and_lets_go_what_was_used_least_recently(model):
    store = KVStore(model, 3 * ENTRY + 100)
    for number in range(3):
        put(store, number)
        assert store.bytes_in_memory == (number + 1) * ENTRY
    assert store.get(ids_of(0)) is not None  # now 1 is the oldest
    put(store, 3)
    assert store.bytes_in_memory == 3 * ENTRY
    assert [store.get(ids_of(number)) is not None for number in range(4)] == [True, False, True, True]
    put(store, 0)  # again: its bytes count once
    assert store.bytes_in_memory == 3 * ENTRY and store.stats.evicted == 1


def test_a_chunk_larger_than_memory_is_used_and_not_kept(model):
    store = KVStore(model, ENTRY - 1)
    assert holds(put(store))
    assert store.bytes_in_memory == 0 and store.get(ids_of(0)) is None


def test_the_folder_holds_no_more_bytes_than_its_limit_and_lets_go_what_was_used_least_recently(model, tmp_path):
    put(KVStore(model, 0, tmp_path / "one"))
    size = sum(path.stat().st_size for path in (tmp_path / "one").glob("*/*"))
    store = KVStore(model, 0, tmp_path / "two", disk_bytes=3 * size + 100)
    for number in range(4):
        put(store, number)
        os.utime(file_of(store, number), (number, number))
        assert sum(path.stat().st_size for path in (tmp_path / "two").glob("*/*")) <= 3 * size + 100
        if number == 2:
            assert store.get(ids_of(0)) is not None  # touched: 1 is the oldest
    assert [file_of(store, number).exists() for number in range(4)] == [True, False, True, True]


def test_a_limit_below_one_chunk_is_said_once_and_memory_goes_on(model, tmp_path):
    store = KVStore(model, 1 << 20, tmp_path, disk_bytes=100)
    with pytest.warns(UserWarning, match="the limit is 100.*give the store a higher limit"):
        put(store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(store, 1)
    assert holds(store.get(ids_of(0))) and not list(tmp_path.glob("*/*"))


def test_a_chunk_larger_than_the_limit_of_the_disk_does_not_keep_smaller_ones_from_it(model, tmp_path):
    store = KVStore(model, 0, tmp_path, disk_bytes=2 * ENTRY + 4000)
    put(store)
    with pytest.warns(UserWarning, match="the limit is"):
        put(store, 1, n=600)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(store, 2, n=600)
        put(store, 3)
    assert [store.get(ids_of(number, n)) is not None for number, n in ((0, 6), (1, 600), (2, 600), (3, 6))] == [
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("limit", ["memory_bytes", "disk_bytes"])
def test_a_negative_limit_is_refused(model, limit):
    with pytest.raises(ValueError, match=f"{limit}=-1: a limit is 0 bytes or more"):
        KVStore(model, **{limit: -1})


# ---------------------------------------------------------------------- damage


def refused(model, folder, match, number=0):
    """Asking for a chunk whose file is bad gives a warning that names it and no chunk; once computed again, it is well."""
    store = KVStore(model, 0, folder)
    with pytest.warns(UserWarning, match=match) as said:
        chunk = store.get(ids_of(number))
        if chunk is not None:
            with pytest.raises(Damaged, match="safetensors"):
                [chunk.layer(index) for index in range(LAYERS)]
    assert str(file_of(store, number)) in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get(ids_of(number)) is None  # and is not asked of again
    put(store, number)
    assert holds(store.get(ids_of(number)), number)
    assert store.stats.damaged + store.stats.foreign == 1


@pytest.mark.parametrize("left", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_reported_and_not_used(model, tmp_path, left):
    path = file_of(store := KVStore(model, 0, tmp_path))
    put(store)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * left) if left == 0.5 else left])
    refused(model, tmp_path, "cannot be read")


def test_no_byte_of_a_file_can_change_unnoticed(model, tmp_path):
    path = file_of(store := KVStore(model, 0, tmp_path))
    put(store)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = [*range(0, header, 7), *range(header, len(content), 97), len(content) - 1]
    assert len(places) > 100
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        store = KVStore(model, 0, tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chunk = store.get(ids_of(0))
            if chunk is None:
                continue
            try:
                layers = [chunk.layer(index) for index in range(LAYERS)]
            except Damaged:
                continue
        # a byte of the header that says nothing of the values (their sum in bytes, a name that is not read)
        assert place < header, f"byte {place} changed and nobody noticed"
        keys, values = rows()
        assert all(torch.equal(k, keys[i]) and torch.equal(v, values[i]) for i, (k, v) in enumerate(layers))


def test_a_flipped_byte_is_found_in_the_layer_that_has_it_when_that_is_read(model, tmp_path):
    put(KVStore(model, 0, tmp_path))
    path = next(tmp_path.glob("*/*.safetensors"))
    with safe_open(path, "pt") as file:
        wanted = file.get_tensor("values.1")
    raw = bytes(wanted.view(-1).view(torch.uint8).tolist())
    content = bytearray(path.read_bytes())
    content[content.find(raw) + 5] ^= 1
    path.write_bytes(content)
    chunk = KVStore(model, 0, tmp_path).get(ids_of(0))
    assert torch.equal(chunk.layer(0)[0], rows()[0][0]) and torch.equal(chunk.layer(2)[1], rows()[1][2])
    with pytest.warns(UserWarning, match="is damaged in values.1"), pytest.raises(Damaged):
        chunk.layer(1)


def test_files_of_other_kinds_under_a_chunks_name_are_reported_and_not_used(model, tmp_path):
    path = file_of(store := KVStore(model, 0, tmp_path))
    path.write_text("no chunk")
    refused(model, tmp_path, "cannot be read")
    save_file({"keys.0": torch.zeros(2)}, path)
    refused(model, tmp_path, "is no chunk of this format")
    put(store, 1)
    file_of(store, 1).rename(path)
    refused(model, tmp_path, "is of another model or chunk than its name says")


def fifo(path, folder):
    os.mkfifo(path)


def link_to_a_chunk(path, folder):
    other = folder / "elsewhere.safetensors"
    path.rename(other) if path.exists() else other.write_bytes(b"")
    path.symlink_to(other)


def link_to_itself(path, folder):
    path.symlink_to(path)


def link_to_nothing(path, folder):
    path.symlink_to(folder / "nothing")


def a_folder(path, folder):
    path.mkdir()


@pytest.mark.parametrize("make", [fifo, link_to_a_chunk, link_to_itself, link_to_nothing, a_folder])
@pytest.mark.timeout(20)
def test_a_link_a_pipe_or_a_folder_in_a_chunks_place_is_a_miss_and_the_others_are_still_written(model, tmp_path, make):
    """Nothing is waited for, followed, or deleted elsewhere; limits, sizes and forgetting go on."""
    path = file_of(store := KVStore(model, 0, tmp_path, disk_bytes=3 * ENTRY))
    put(store)
    if make is not link_to_a_chunk:
        path.unlink()
    make(path, tmp_path)
    store = KVStore(model, 0, tmp_path, disk_bytes=3 * ENTRY)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert store.get(ids_of(0)) is None
    store.forget()
    assert store.disk.nbytes() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(put(store, 0)) == 6  # used, whether or not it can be written there
        for number in (1, 2, 3):
            put(store, number)
            assert holds(store.get(ids_of(number)), number)
    if make is link_to_a_chunk:
        assert (tmp_path / "elsewhere.safetensors").is_file()


def test_a_file_that_goes_between_two_looks_is_a_miss_or_is_still_read(model, tmp_path, monkeypatch):
    """Before it is opened, it was never there; once it is open, what it held is what is read."""
    path = file_of(store := KVStore(model, 0, tmp_path))
    put(store)
    chunk = store.get(ids_of(0))
    path.unlink()
    assert holds(chunk)
    put(store)
    stock = os.open

    def opened(name, *more, **options):
        if str(name) == str(path):
            path.unlink()
        return stock(name, *more, **options)

    monkeypatch.setattr(os, "open", opened)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get(ids_of(0)) is None and store.stats.damaged == 0


@pytest.mark.parametrize("left", [0, 9, 0.5, -1])
def test_a_file_that_is_shortened_while_it_is_read_is_damaged_and_kills_nobody(model, tmp_path, left):
    """Read in a process of its own: a mapped file would end it."""
    path = file_of(store := KVStore(model, 0, tmp_path))
    put(store)
    size = path.stat().st_size

    def read(results):
        chunk = KVStore(model, 0, tmp_path).get(ids_of(0))
        os.truncate(path, int(size * left) if left == 0.5 else left % size)
        found = []
        for index in range(LAYERS):
            try:
                found.append(all(torch.equal(a, rows()[i][index]) for i, a in enumerate(chunk.layer(index))))
            except Damaged:
                found.append(None)
        results.put(found)

    results = FORK.Queue()
    process = FORK.Process(target=read, args=(results,))
    process.start()
    found = results.get(timeout=60)
    process.join()
    assert process.exitcode == 0 and None in found and False not in found


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_whole_folder_may_go_and_is_made_again(model, tmp_path, where):
    store = KVStore(model, 0, tmp_path / "store")
    if where == "after":
        put(store)
    shutil.rmtree(tmp_path / "store")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get(ids_of(0)) is None and store.disk.nbytes() == 0
        put(store)
        assert holds(store.get(ids_of(0)))


def test_a_folder_that_becomes_a_link_is_not_followed_and_nothing_behind_it_is_deleted(model, tmp_path):
    store = KVStore(model, 0, tmp_path / "store", disk_bytes=2 * ENTRY)
    put(store)
    elsewhere = tmp_path / "elsewhere"
    store.disk.own.rename(elsewhere)
    precious = elsewhere / "model.safetensors"
    precious.write_bytes(b"x" * 4 * ENTRY)
    store.disk.own.symlink_to(elsewhere)
    before = sorted(path.name for path in elsewhere.iterdir())
    assert store.get(ids_of(0)) is None
    with pytest.warns(UserWarning, match="is a link"):
        put(store, 1)
    assert sorted(path.name for path in elsewhere.iterdir()) == before
    with pytest.raises(ValueError, match="is a link"):
        KVStore(model, 0, tmp_path / "store")


def forged(path, change):
    """Rewrite a file's header, its tensors as they are, padded as safetensors pads."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def swap(a, b):
    def change(header):
        header[a], header[b] = header[b], header[a]
        sums = json.loads(header["__metadata__"]["sums"])
        sums[a], sums[b] = sums[b], sums[a]
        header["__metadata__"]["sums"] = json.dumps(sums)

    return change


def entry(**changes):
    return lambda header: header["keys.1"].update(changes)


def metadata(**changes):
    return lambda header: header["__metadata__"].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        swap("keys.0", "keys.1"),
        swap("keys.0", "values.0"),
        entry(shape=[1, 2, 6, 1 << 40], data_offsets=[0, 1 << 50]),
        entry(shape=[1, 1 << 31, 1 << 31, 4]),
        entry(shape=[1, 2, 3, 32]),
        entry(shape=[1, 2, -6, -16]),
        entry(shape=[1, 2, 6.0, 16]),
        entry(shape="1266"),
        entry(dtype="I32"),
        entry(dtype="X9"),
        entry(dtype=["F32"]),
        entry(data_offsets=[0]),
        entry(data_offsets=[768, 0]),
        entry(data_offsets=[-768, 0]),
        entry(data_offsets=None),
        metadata(sums="{}"),
        metadata(sums="[1]"),
        metadata(sums="[" * 100_000),
        metadata(sums='{"ids": 1e999}'),
        metadata(sums='{"ids": "x"}'),
        metadata(identity="{}"),
        metadata(key="0" * 32),
        metadata(format=7),
        lambda header: header.pop("__metadata__") and None,
        lambda header: header.update({"__metadata__": [1]}),
        lambda header: header.update({"keys.9": header["keys.1"]}),
        lambda header: header.pop("keys.1") and None,
        lambda header: header.update({"keys.1": None}),
        lambda header: b"[" * 200_000,
        lambda header: b"[]",
        lambda header: b"\xff\xfe",
        lambda header: b'{"ids": NaN}',
    ],
)
def test_a_forged_header_is_a_miss(model, tmp_path, change):
    """Whatever it says: no crash, no huge allocation, no other keys."""
    path = file_of(store := KVStore(model, 0, tmp_path))
    put(store)
    forged(path, change)
    store = KVStore(model, 0, tmp_path)
    with pytest.warns(UserWarning, match="not used, the chunk is computed again"):
        chunk = store.get(ids_of(0))
        if chunk is not None:
            with pytest.raises(Damaged):
                [chunk.layer(index) for index in range(LAYERS)]
    put(store)
    assert holds(store.get(ids_of(0)))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 0, 3])
def test_a_forged_length_of_the_header_is_a_miss(model, tmp_path, length):
    path = file_of(store := KVStore(model, 0, tmp_path))
    put(store)
    content = path.read_bytes()
    path.write_bytes(length.to_bytes(8, "little") + content[8:])
    refused(model, tmp_path, "cannot be read")


def test_chunks_of_another_number_of_layers_or_heads_are_kept_in_memory_alone(model, tmp_path):
    """A file of them would never be used: its shapes are not the model's."""
    store = KVStore(model, folder=tmp_path)
    keys, values = rows(layers=2)
    store.put(ids_of(0), keys, values)
    assert not list(tmp_path.glob("*/*")) and store.get(ids_of(0)) is not None


def test_a_process_without_free_descriptors_computes_and_damages_nothing(model, tmp_path, monkeypatch):
    put(store := KVStore(model, 0, tmp_path))

    def full(*args, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(os, "open", full)
        assert store.get(ids_of(0)) is None
    assert holds(store.get(ids_of(0))) and store.stats.damaged == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.5, "5", True, [], -1])
@pytest.mark.parametrize("name", ["memory_bytes", "disk_bytes", "memory_mb", "disk_mb"])
def test_a_limit_that_is_no_number_of_bytes_is_refused_by_name(model, name, value):
    with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))}: a limit is 0 .* or more"):
        KVStore(model, **{name: value}) if name.endswith("bytes") else store_of(model, "x", **{name: value})


@pytest.mark.parametrize("ids", [[1.5], ["a"], [True], torch.tensor([1.0]), [None]])
def test_ids_that_are_no_integers_are_refused_and_not_rounded(model, ids):
    with pytest.raises(ValueError, match="ids hold .*: token ids are integers"):
        KVStore(model).get(ids)


def test_a_folder_that_is_no_path_and_layers_that_do_not_pair_are_refused(model):
    with pytest.raises(ValueError, match="folder=5 is no path"):
        KVStore(model, folder=5)
    with pytest.raises(ValueError, match="keys of 3 layers and values of 2"):
        KVStore(model).put(ids_of(0), rows()[0], rows()[1][:2])


# ---------------------------------------------------------------------- models


def test_models_share_a_folder_and_never_each_others_chunks(model, tmp_path):
    others = [small_model(seed=1), small_model(scale=0.11), small_model(dtype=torch.bfloat16), small_model("mistral")]
    others.append(small_model(rope_parameters={"rope_type": "default", "rope_theta": 5000.0}))
    put(KVStore(model, 0, tmp_path))
    for other in others:
        store = KVStore(other, 0, tmp_path)
        assert store.get(ids_of(0)) is None
        put(store, 0)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 1 + len(others)
    again = small_model(fresh=True)
    assert holds(KVStore(again, 0, tmp_path).get(ids_of(0)))


def test_an_entry_of_another_model_in_this_ones_folder_is_reported_and_not_used(model, tmp_path):
    mine, theirs = KVStore(model, 0, tmp_path), KVStore(small_model(seed=1), 0, tmp_path)
    put(theirs)
    file_of(theirs).rename(file_of(mine))
    refused(model, tmp_path, "is of another model")


def test_a_weight_that_is_written_to_makes_another_model():
    model = small_model(fresh=True)
    before = identity(model)
    assert identity(model) == before == identity(small_model())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    written = identity(model)["weights"]
    assert written != before["weights"]
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(2)  # as adapters are merged: no version counts it
    assert identity(model)["weights"] not in (written, before["weights"])
    with pytest.raises(ValueError, match="another model"):
        store = KVStore(small_model())
        store.check(model)


def test_weights_that_lie_on_no_device_are_known_by_the_files_they_come_from(tmp_path):
    found = set()
    for content in ("a", "b"):
        model = small_model(fresh=True).to("meta")
        (tmp_path / "model.safetensors").write_text(content)
        model.config._name_or_path = str(tmp_path)
        found.add(identity(model)["weights"])
    assert len(found) == 2


def test_another_tokenizer_makes_other_chunks(model):
    class Words(CharacterTokenizer):
        def get_vocab(self):
            return {"a": 1}

    assert len({tokens(None), tokens(CharacterTokenizer()), tokens(Words())}) == 3
    assert KVStore(model).key([5]) != KVStore(model, tokenizer=Words()).key([5])


def test_there_is_one_store_per_model_purpose_and_settings(model):
    other = small_model(seed=1)
    assert store_of(model, "a") is store_of(model, "a")
    assert store_of(model, "a") is not store_of(model, "b") is not store_of(other, "b")
    assert store_of(model, "a", memory_mb=1).memory_bytes == 1 << 20


def test_the_store_of_a_model_gives_way_to_a_new_one_when_its_weights_or_number_type_change():
    model = small_model(fresh=True)
    stores = [store_of(model, "a")]
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(2)
    stores.append(store_of(model, "a"))
    model.to(torch.bfloat16)
    stores.append(store_of(model, "a"))
    assert len(set(map(id, stores))) == 3 and store_of(model, "a") is stores[2]


# ---------------------------------------------------------------------- bad input


def test_empty_chunks_unknown_forms_and_shapes_that_do_not_fit_are_refused(model):
    store, (keys, values) = KVStore(model), rows()
    with pytest.raises(ValueError, match="an empty chunk has no keys and values: leave it out"):
        store.get([])
    with pytest.raises(ValueError, match="form='turned'; valid: raw, rotated"):
        store.get([1], form="turned")
    with pytest.raises(ValueError, match=r"keys of layer 0 have shape \(1, 2, 6, 16\): a chunk of 4 tokens"):
        store.put([1, 2, 3, 4], keys, values)


def test_a_folder_that_is_a_file_is_refused_with_what_to_do(model, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="cannot hold a store.*name a folder that can be written to"):
        KVStore(model, folder=tmp_path / "file")


# ---------------------------------------------------------------------- disks and processes


def full_disk(monkeypatch, after):
    """Writing fails with ENOSPC, leaving a part of the file, from the given call on."""
    calls = []

    def failing(tensors, path, metadata=None):
        calls.append(path)
        if len(calls) > after:
            Path(path).write_bytes(b"x" * 50)
            raise SafetensorError(f"I/O error: No space left on device (os error {errno.ENOSPC})")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(disk_tier, "save_file", failing)


def test_a_full_disk_is_said_once_leaves_no_part_behind_and_memory_goes_on(model, tmp_path, monkeypatch):
    full_disk(monkeypatch, after=1)
    store = KVStore(model, 1 << 20, tmp_path)
    put(store, 0)
    with pytest.warns(UserWarning, match="No space left on device.*make room there.*goes on in memory"):
        put(store, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(store, 2)
    assert all(holds(store.get(ids_of(number)), number) for number in range(3))
    assert [path.name for path in tmp_path.glob("*/*")] == [file_of(store, 0).name]
    assert holds(KVStore(model, 0, tmp_path).get(ids_of(0)))


def in_another_process(work, *arguments):
    """A forked process at work; the models of these tests run on one thread, so that a fork is safe."""
    process = FORK.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def _write_with_a_limit(model, folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    store = KVStore(model, 1 << 20, folder)
    with pytest.warns(UserWarning, match="goes on in memory"):
        put(store)
    assert holds(store.get(ids_of(0)))


def test_a_limit_of_the_system_on_file_sizes_is_a_full_disk(model, tmp_path):
    """Real files: the kernel refuses to write more than 2 KiB to any."""
    process = in_another_process(_write_with_a_limit, model, tmp_path)
    process.join(60)
    assert process.exitcode == 0
    assert not list(tmp_path.glob("*/*")) and KVStore(model, 0, tmp_path).get(ids_of(0)) is None


MANY = 4000  # tokens of a chunk whose file takes a while to write


def _write_for_ever(model, folder):
    store = KVStore(model, 0, folder)
    while True:
        put(store, 0)
        put(store, 1, n=MANY)


def test_processes_that_write_the_same_chunk_and_are_killed_while_at_it_never_show_a_reader_anything_wrong(
    model, tmp_path
):
    writers = [in_another_process(_write_for_ever, model, tmp_path) for _ in range(2)]
    read, end = 0, time.monotonic() + 1.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            while time.monotonic() < end or read < 3:
                for number, n in ((0, 6), (1, MANY)):
                    chunk = KVStore(model, 0, tmp_path).get(ids_of(number, n))
                    read += chunk is not None and holds(chunk, number, n)
                assert time.monotonic() < end + 60 and all(writer.is_alive() for writer in writers)
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
    assert [writer.exitcode for writer in writers] == [-signal.SIGKILL] * 2
    store = KVStore(model, 0, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, n in ((0, 6), (1, MANY)):
            chunk = store.get(ids_of(number, n))
            assert chunk is None or holds(chunk, number, n)
        put(store, 1, n=MANY)
        assert holds(store.get(ids_of(1, MANY)), 1, MANY)


def _die_half_way(model, folder):
    def killed(tensors, path, metadata=None):
        save_file(tensors, path, metadata)
        Path(path).write_bytes(Path(path).read_bytes()[:999])
        os.kill(os.getpid(), signal.SIGKILL)

    disk_tier.save_file = killed
    put(KVStore(model, 0, folder))


def test_what_a_process_left_that_was_killed_while_writing_is_not_read_and_goes_away_after_an_hour(model, tmp_path):
    process = in_another_process(_die_half_way, model, tmp_path)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    (left,) = tmp_path.glob("*/.*")
    assert left.stat().st_size == 999
    store = KVStore(model, 0, tmp_path)
    assert store.get(ids_of(0)) is None and left.exists()  # it might still be about to be written
    put(store)
    os.utime(left, (0, 0))
    assert holds(KVStore(model, 0, tmp_path).get(ids_of(0))) and not left.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_file_system_without_room_is_a_full_disk(model, tmp_path):
    """Real: a tmpfs of 64 KiB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        store, number = KVStore(model, 1 << 20, tmp_path), 0
        with pytest.warns(UserWarning, match="goes on in memory"):
            while number < 20:
                put(store, number)
                number += 1
        whole = list(tmp_path.glob("*/*"))
        assert 0 < len(whole) < 20 and all(path.suffix == ".safetensors" for path in whole)
        assert all(holds(store.get(ids_of(number)), number) for number in range(20))
        again = KVStore(model, 0, tmp_path)
        assert sum(holds(c, i) for i in range(20) if (c := again.get(ids_of(i))) is not None) == len(whole)
        del again
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
