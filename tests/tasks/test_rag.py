"""Task rag: passages as segments of a prompt, three prefills of each timed together, F1 as CacheBlend scores it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from composed import composed
from rich.console import Console
from test_kvstore import Rounding
from test_longbench import CHAT, bpe

from kvcompress import compress, load
from kvcompress.commands.report import main as report
from kvcompress.common.prose import Encoder
from kvcompress.data import passages
from kvcompress.measure.measuring import without_peaks
from kvcompress.method import Method
from kvcompress.methods import CacheBlend, Full, SnapKV
from kvcompress.report import reuse
from kvcompress.reuse import kv_store
from kvcompress.reuse.prefix import PrefixReuse
from kvcompress.sweep import record
from kvcompress.sweep.launcher.model_pool import ModelPool
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.tasks import Rag
from kvcompress.tasks.rag import PREFIX, WAYS, answer_of, f1

MUSIQUE = [
    {
        "ctxs": [
            {"title": "", "text": "ann was born in bonn, a town on the rhine."},
            {"title": "Rivers", "text": "the rhine is a river. it flows north to the sea."},
            {"title": "", "text": "bob was born in rome."},
        ],
        "question": "Where was Ann born",
        "answers": ["Bonn", "the town of Bonn"],
    },
    {
        "ctxs": [
            {"title": "", "text": "carl lives by a lake."},
            {"title": "", "text": "the lake is called como. it lies in the north."},
            {"title": "", "text": "dora lives in oslo."},
        ],
        "question": "Which lake does Carl live by?",
        "answers": ["Como"],
    },
]


def write(path, rows, lines=None):
    lines = path.suffix != ".json" if lines is None else lines
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) if lines else json.dumps(rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def musique(tmp_path):
    return write(tmp_path / "musique_s.json", MUSIQUE)


def samples_of(source, tokenizer=None, **settings):
    return list(Rag(source=source, **settings).samples(tokenizer or bpe()))


def texts_of(sample, tokenizer):
    return [tokenizer.decode(segment) for segment in sample.segments]


# ---------------------------------------------------------------------- prompts


def test_a_prompt_is_prefix_passages_and_question_as_the_released_code_writes_them(musique):
    tokenizer = bpe()
    one, other = samples_of(musique, shuffle=False)
    assert texts_of(one, tokenizer) == [
        PREFIX,
        "\n\nann was born in bonn, a town on the rhine.\n\n",
        "Rivers\n\nthe rhine is a river. it flows north to the sea.\n\n",
        "\n\nbob was born in rome.\n\n",
        "\n\nAnswer the question directly based on the given passages. Do NOT repeat the question. The answer should be "
        "within 5 words. \nQuestion:where was Ann born?\nAnswer:",
    ]
    assert texts_of(other, tokenizer)[-1].endswith("Question:which lake does Carl live by?\nAnswer:")
    (turn,) = one.turns
    assert turn.ids == () and turn.max_new_tokens == 32 and turn.references == ("Bonn", "the town of Bonn")
    assert (one.id, other.id) == ("0", "1") and one.protocol["question"] == "seen"
    assert one.meta["segment_tokens"] == [len(segment) for segment in one.segments]


def test_with_a_chat_template_its_marks_belong_to_the_first_and_the_last_segment(musique):
    tokenizer = bpe(CHAT)
    texts = texts_of(samples_of(musique, tokenizer)[0], tokenizer)
    assert texts[0].startswith("<u>You will be asked") and texts[-1].endswith("\nAnswer:</u><a>")
    assert texts_of(samples_of(musique, tokenizer, template="none")[0], tokenizer)[0] == PREFIX


def test_a_passage_has_the_same_ids_wherever_it_stands_and_no_text_is_tokenised_twice(musique):
    tokenizer = bpe()
    encode = Encoder(tokenizer)
    wanted = {encode(text) for text in passages.read(Rag(source=musique).file())[0].passages}
    for seed in range(6):
        sample = samples_of(musique, tokenizer, seed=seed)[0]
        assert set(sample.segments[1:-1]) == wanted
        assert [token for segment in sample.segments for token in segment] == sample.prompt_ids()


def test_each_question_has_an_order_of_its_own_that_the_seed_decides(tmp_path):
    rows = [{"passages": [f"p{i}" for i in range(8)], "question": f"q{n}", "answers": ["a"]} for n in range(6)]
    path = write(tmp_path / "own.jsonl", rows)
    orders = [tuple(sample.meta["order"]) for sample in samples_of(path)]
    assert len(set(orders)) == 6 and all(sorted(order) == list(range(8)) for order in orders)
    assert orders == [tuple(sample.meta["order"]) for sample in samples_of(path)]
    assert orders != [tuple(sample.meta["order"]) for sample in samples_of(path, seed=1)]
    assert {tuple(sample.meta["order"]) for sample in samples_of(path, shuffle=False)} == {tuple(range(8))}


def test_longbench_is_parted_at_its_numbers_and_own_files_are_read_too(tmp_path):
    context = (
        "Passage 1:\nBonn\nA town.\nOn the Rhine.\nPassage 2:\nJust a line\nPassage 10:\nRome\nIn Italy. Passage 3: no"
    )
    rows = [
        {"context": context, "input": "Where?", "answers": ["Rome"], "_id": "x"},
        {"passages": ["one", {"text": "two", "title": "T"}], "question": "Q?", "answers": ["A", 7], "id": 3},
    ]
    found = passages.read(tmp_path / "mixed.jsonl" if write(tmp_path / "mixed.jsonl", rows) else None)
    assert found[0].passages == (
        "Bonn\n\nA town.\nOn the Rhine.\n\n",
        "\n\nJust a line\n\n",
        "Rome\n\nIn Italy. Passage 3: no\n\n",
    )
    assert found[0].id == "x" and found[0].question == "Where?"
    assert (
        found[1].passages == ("\n\none\n\n", "T\n\ntwo\n\n") and found[1].answers == ("A", "7") and found[1].id == "3"
    )


# ---------------------------------------------------------------------- fitting


def fitted(texts, room, how="drop", most=None, answers=("zebra",)):
    record = passages.MultiDocQuestion("r", tuple(text + "\n\n" for text in texts), "q?", answers)
    return passages.fit(record, len_encoder(), room, how, most, None)


def len_encoder():
    """One id per character."""
    return lambda text: tuple(map(ord, text))


def test_whole_passages_are_dropped_until_the_rest_fits_those_with_an_answer_last():
    texts = ["a" * 18, "b" * 38, "c" * 10 + " Zebra " + "c" * 11, "d" * 8]  # 20, 40, 30, 10 with what ends them
    assert fitted(texts, 100).order == (0, 1, 2, 3)
    assert fitted(texts, 60).order == (0, 2, 3)
    assert fitted(texts, 49).order == (2, 3)  # 20 does not fit beside 30, 10 does
    assert (fitted(texts, 60).dropped, fitted(texts, 60).cut) == (1, 0)
    assert fitted(texts, None, most=2).order == (0, 2)
    alone = fitted(texts, 20)
    assert alone.order == (2,) and len(alone.chunks[0]) == 20 and alone.chunks[0][-2:] == (10, 10) and alone.cut == 10


def test_passages_are_cut_to_one_length_where_that_is_asked_and_short_ones_stay_whole():
    texts = ["a" * 18, "b" * 38, "c" * 28, "d" * 8]
    found = fitted(texts, 70, "cut")
    assert [len(chunk) for chunk in found.chunks] == [20, 20, 20, 10] and found.cut == 30 and found.dropped == 0
    assert all(chunk[-2:] == (10, 10) for chunk in found.chunks)
    assert passages.shared_out({0: 5, 1: 50, 2: 7, 3: 9}, 25) == {0: 5, 2: 6, 3: 7, 1: 7}
    for room in range(16, 120):
        lengths = [len(chunk) for chunk in fitted(texts, room, "cut").chunks]
        assert sum(lengths) == min(room, 100)


def test_a_prompt_is_no_longer_than_asked_and_says_what_was_left_out(musique):
    whole = samples_of(musique, max_tokens=None)[0]
    for how in ("drop", "cut"):
        for limit in (len(whole.prompt_ids()) - 1, len(whole.prompt_ids()) - 40):
            sample = samples_of(musique, max_tokens=limit, fit=how)[0]
            assert len(sample.prompt_ids()) <= limit < len(whole.prompt_ids())
            assert sample.meta["dropped"] > 0 if how == "drop" else sample.meta["truncated_tokens"] > 0


def test_no_room_for_passages_is_refused_with_the_setting_to_raise(musique):
    with pytest.raises(ValueError, match="leave -?[0-9]+ tokens for passages, at least 16.*raise task.max_tokens"):
        samples_of(musique, max_tokens=120)
    with pytest.raises(ValueError, match="leave 16 tokens for passages, at least 20 are"):
        fitted(["ab"] * 20, 16, "cut")
    assert sum(map(len, fitted(["ab"] * 20, 16, "cut", most=16).chunks)) == 16


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"question": "q", "answers": ["a"]}, "line 2: a record needs one of passages, ctxs, context; found: question"),
        ({"ctxs": [{"text": "x"}], "answers": ["a"]}, "line 2: field 'question' is missing"),
        ({"passages": ["x"], "question": "q"}, "line 2: field 'answers' is missing"),
        ({"passages": ["x"], "question": "q", "answers": []}, "line 2: answers must be a list of at least one"),
        ({"passages": [], "question": "q", "answers": ["a"]}, "line 2: passages holds no passage"),
        (
            {"passages": "x", "question": "q", "answers": ["a"]},
            "line 2: passages must be a list of passages, found str",
        ),
        ({"passages": ["x", " \n"], "question": "q", "answers": ["a"]}, "passage 2 is empty: leave it out"),
        ({"passages": ["x", 3], "question": "q", "answers": ["a"]}, "passage 2 must be a text, or an object"),
        ({"passages": ["x"], "question": " ", "answers": ["a"]}, "question is empty"),
        ({"context": "Passage 1:\n", "input": "q", "answers": ["a"]}, "context holds no passage"),
        ([1], "a JSON object is needed, found list"),
    ],
)
def test_a_record_that_lacks_something_is_named_with_its_line(tmp_path, row, match):
    good = {"passages": ["x"], "question": "q", "answers": ["a"]}
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"bad.jsonl line 2: .*"):
        passages.read(path)
    with pytest.raises(ValueError, match=match):
        Rag(source=str(path)).fingerprint()


def test_broken_json_is_named_with_its_line_in_lines_and_in_arrays(tmp_path):
    lines, array = tmp_path / "bad.jsonl", tmp_path / "bad.json"
    lines.write_text('{"passages": ["x"], "question": "q", "answers": ["a"]}\n{"passages": [\n')
    array.write_text('[{"ctxs": [],\n "question": }]')
    with pytest.raises(ValueError, match="bad.jsonl line 2: no JSON"):
        passages.read(lines)
    with pytest.raises(ValueError, match=r"bad.json: no JSON \(.*line 2"):
        passages.read(array)
    array.write_text("[]")
    with pytest.raises(ValueError, match="holds no record"):
        passages.read(array)
    write(array, [{"ctxs": [{"text": "x"}], "question": "q"}])
    with pytest.raises(ValueError, match="bad.json record 1: field 'answers' is missing"):
        passages.read(array)


def test_a_source_that_is_not_there_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match="'musique_s': no cacheblend/musique_s.json in paths.data=.*set paths.data"):
        Rag(data=str(tmp_path)).fingerprint()
    (tmp_path / "longbench_v1").mkdir()
    write(tmp_path / "longbench_v1" / "hotpotqa.jsonl", [{"context": "a", "input": "q", "answers": ["a"]}])
    assert Rag(data=str(tmp_path), source="hotpotqa").fingerprint()["records"] == 1


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"fit": "squeeze"}, "task.fit='squeeze'; valid: drop, cut"),
        ({"tier": "tape"}, "task.tier='tape'; valid: memory, disk"),
        ({"rounds": 0}, "task.rounds=0; at least 1"),
        ({"max_tokens": 0}, "task.max_tokens=0; at least 1"),
        ({"memory_mb": -1}, "task.memory_mb=-1; 0 MiB or more"),
        ({"baselines": ["half"]}, "task.baselines='half'; valid: full, prefix"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        Rag(**settings)


# ---------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("text", "scored"),
    [
        ("\n\nBonn, on the Rhine\nQuestion: more", "Bonn, on the Rhine"),
        ("Yes, he was.", "Yes"),
        ("no. It was", "no"),
        ("Norway", "Norway"),  # the released code reads these two as no and yes
        ("Yesterday", "Yesterday"),
        ("", ""),
        ("\n", ""),
    ],
)
def test_what_is_scored_of_an_answer_is_its_first_line_or_yes_or_no(text, scored):
    assert answer_of(text) == scored


def test_f1_counts_token_ids_of_normal_forms_and_takes_the_best_reference():
    words = load("random/llama")[1]  # one token per byte
    assert f1("The Bonn!", ["bonn"], words) == 1.0
    assert f1("", ["bonn"], words) == 0.0 and f1("xyz", ["bonn"], words) == 0.0
    # "bo" of "bonn": 2 shared of 2 and of 4
    assert f1("bo", ["bonn"], words) == pytest.approx(2 * 1.0 * 0.5 / 1.5)
    assert f1("bo", ["zzz", "bonn", "bone bone"], words) == pytest.approx(2 / 3)
    # "abc" and "cab" hold the same bytes; "aab" and "abb" share one a and one b of three
    assert f1("abc", ["cab"], words) == 1.0
    assert f1("xaab", ["abbx"], words) == pytest.approx(3 / 4)
    assert f1("the", ["a"], words) == 1.0  # nothing is left of either


# ---------------------------------------------------------------------- running


def llama(**options):
    return load("random/llama", seed=1, **options)


@pytest.fixture(scope="module")
def loaded():
    return llama()


@pytest.fixture(autouse=True)
def fresh_stores(monkeypatch):
    monkeypatch.setattr(kv_store, "_stores", type(kv_store._stores)())


def ran(loaded, method, task, number=0):
    model, tokenizer = loaded
    sample = list(task.samples(tokenizer))[number]
    with compress(model, Method(), tokenizer=tokenizer) as session:
        sample = replace(sample, reference=task.reference(session, sample))
    with compress(model, method, tokenizer=tokenizer) as session, without_peaks():  # which collect garbage each time
        out = task.run(session, sample)
    out["text"] = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in out["tokens"]]
    return sample, out, task.score(sample, out)


def task_of(source, **settings):
    return Rag(source=source, answer_tokens=6, max_tokens=None, **settings)


def test_a_full_recompute_answers_as_the_full_model_does_and_no_recompute_drifts(loaded, musique):
    sample, out, score = ran(loaded, CacheBlend(ratio=1.0), task_of(musique))
    assert score["kl"] <= 1e-6 and score["agree"] == 1.0
    with compress(loaded[0], Full()) as session:
        session.prefill([torch.tensor([segment]) for segment in sample.segments])
        assert session.generate(6, stop=sample.turns[0].stop).tokens[0] == out["tokens"][0]
    _, reused, drift = ran(loaded, CacheBlend(ratio=0.0), task_of(musique))
    assert drift["kl"] > 1e-4
    assert reused["reuse"]["recompute_share"] < out["reuse"]["recompute_share"] == 1.0
    assert reused["reuse"]["chunks_computed"] == 0 and reused["reuse"]["bytes_loaded"] > 0
    context = sum(map(len, sample.segments[:-1]))
    assert reused["reuse"]["tokens_recomputed"] + reused["reuse"]["tokens_reused"] == pytest.approx(context)


def test_all_ways_are_timed_on_every_prompt_in_an_order_that_turns(loaded, musique, monkeypatch):
    order = []
    for way, how in WAYS.items():
        if how is not None:
            original = type(how).run
            monkeypatch.setattr(
                type(how), "run", lambda self, *a, way=way, do=original: (order.append(way), do(self, *a))[1]
            )
    blended = type(CacheBlend().make_prefill())
    own = blended.run
    monkeypatch.setattr(blended, "run", lambda self, *a: (order.append("own"), own(self, *a))[1])
    for number, wanted in ((0, ["full", "prefix", "own", "prefix", "own", "full"]), (1, ["prefix", "own", "full"])):
        task = task_of(musique, rounds=2 if number == 0 else 1)
        order.clear()
        _, out, score = ran(loaded, CacheBlend(), task, number)
        assert order[1:] == wanted  # the first is the reference
        assert {way: len(times) for way, times in out["seconds"].items()} == dict.fromkeys(wanted, task.rounds)
        assert all(second > 0 for times in out["seconds"].values() for second in times)
        assert score["ttft_to_full"] > 0 and score["ttft_to_prefix"] > 0


def test_prefix_reuse_of_the_same_prompt_finds_only_what_earlier_prompts_share(loaded, musique):
    task = task_of(musique)
    _, first, _ = ran(loaded, CacheBlend(), task, 0)
    sample, second, _ = ran(loaded, CacheBlend(), task, 1)
    assert first["prefix_reuse"]["tokens_reused"] == 0
    assert second["prefix_reuse"]["tokens_reused"] == len(sample.segments[0])


def test_prefix_reuse_never_finds_what_another_run_or_round_of_the_same_prompt_left(loaded, musique):
    """Else the second ratio of a sweep would be compared with a prompt that is already in the store."""
    for ratio in (0.2, 0.4):
        _, out, _ = ran(loaded, CacheBlend(ratio=ratio), task_of(musique, rounds=2), 0)
        assert out["prefix_reuse"]["tokens_reused"] == 0
        assert out["reuse"]["ratio"] == ratio and "ratio" not in out["prefix_reuse"]


def test_chunks_are_precomputed_once_and_not_within_the_time_measured(loaded, musique):
    task = task_of(musique)
    _, first, _ = ran(loaded, CacheBlend(), task)
    _, again, _ = ran(loaded, CacheBlend(ratio=0.3), task)
    assert first["precomputed"] == 4 and again["precomputed"] == 0
    assert first["reuse"]["chunks_computed"] == again["reuse"]["chunks_computed"] == 0


def test_chunks_on_disk_are_read_from_there_each_time(loaded, musique, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCOMPRESS_STORE", str(tmp_path / "store"))
    task = task_of(musique, tier="disk", rounds=2)
    _, out, score = ran(loaded, CacheBlend(ratio=0.0), task)
    _, memory, other = ran(loaded, CacheBlend(ratio=0.0), task_of(musique))
    store = kv_store.store_of(loaded[0], "chunks", 2048, True)
    assert store.stats.bytes_from_disk >= 2 * out["reuse"]["bytes_loaded"] > 0
    assert score["kl"] == pytest.approx(other["kl"], abs=1e-9) and out["tokens"] == memory["tokens"]


def test_chunks_that_are_stored_as_codes_can_be_blended(loaded, musique):
    model, tokenizer = loaded
    segments = [torch.tensor([segment]) for segment in samples_of(musique, tokenizer)[0].segments]
    found = {}
    for codec in (None, Rounding()):
        with compress(model, CacheBlend(ratio=0.0), store=kv_store.KVStore(model, codec=codec)) as session:
            session.precompute(segments)
            found[codec is None] = session.prefill(segments).logits, session.store.stats.copy()
    (exact, plain), (near, coded) = found[True], found[False]
    assert coded.bytes_stored < 0.3 * plain.bytes_stored and coded.bytes_loaded < 0.3 * plain.bytes_loaded
    assert 0 < (exact - near).abs().max() < 0.1 * exact.std()


def test_other_methods_and_evicting_ones_run_too(loaded, musique):
    blend = CacheBlend().make_prefill()
    for method in (Full(), Full(prefill=PrefixReuse()), SnapKV(budget=0.5, window=4, prefill=blend)):
        _, out, score = ran(loaded, method, task_of(musique))
        assert out["end"]["active"] == method.limited
        assert (score["kl"] <= 1e-6) == (not method.limited)
    assert out["reuse"]["tokens_reused"] > 0


def test_a_model_that_prefix_reuse_cannot_serve_says_how_to_go_without(musique):
    windowed = load("random/gemma2", seed=1)
    with pytest.raises(ValueError, match=r"'gemma2'.*task.baselines=\[full\]"):
        ran(windowed, Full(), task_of(musique))
    assert ran(windowed, Full(), task_of(musique, baselines=["full"]))[2]["kl"] <= 1e-6


@pytest.mark.parametrize("dry", ["false", "true"])
def test_a_limit_without_room_for_passages_ends_the_cell_before_a_model_is_loaded(tmp_path, musique, monkeypatch, dry):
    monkeypatch.setattr(ModelPool, "load", lambda *_: pytest.fail("the model was loaded"))
    common = [f"paths.results={tmp_path}/results", f"task.source={musique}", "model=random/llama", "task=rag"]
    (outcome,) = Scheduler(Console(file=(tmp_path / "log").open("w"))).sweep(
        [composed(*common, "method=cacheblend", "task.max_tokens=120", f"dry={dry}")]
    )
    assert outcome.status == "failed" and "raise task.max_tokens" in outcome.note


def test_one_command_sweeps_ratios_and_the_records_say_what_was_reused(tmp_path, musique):
    console = Console(file=(tmp_path / "log").open("w"), width=200)
    common = [f"paths.results={tmp_path}/results", f"task.source={musique}", "task.answer_tokens=4"]
    common += ["model=random/llama", "task.max_tokens=null", "experiment=rag", "hydra.mode=RUN"]
    cells = [composed(*common, own) for own in ("method.ratio=0.0", "method.ratio=1.0", "method=full")]
    runner = Scheduler(console)
    with without_peaks():
        outcomes = runner.sweep(cells)
    assert [outcome.status for outcome in outcomes] == ["ok"] * 3, [o.record.get("error") for o in outcomes]
    records = [
        record.read_record(outcome.folder / "record.json") for outcome in outcomes
    ]  # with what the last one added
    none, whole, full = sorted(records, key=lambda r: (r["method"], r["metrics.kl"] < 1e-6))
    assert none["metrics.kl"] > 1e-4 and whole["metrics.kl"] <= 1e-6 and full["metrics.kl"] <= 1e-6
    assert (none["metrics.reuse.ratio"], whole["metrics.reuse.ratio"]) == (0.0, 1.0)
    assert none["metrics.reuse.recompute_share"] < 1 == whole["metrics.reuse.recompute_share"]
    assert full["metrics.reuse.tokens_reused"] == 0 and none["baseline"] == full["run_id"]
    for found in (none, whole, full):
        assert found["n_samples"] == 2 and found["metrics.f1_full"] == full["score"]
        assert found["time.ttft_s"] == pytest.approx(found["metrics.ttft_s"])
        assert found["protocol.shared"] is False and found["metrics.ttft_to_full"] > 0
    board(tmp_path, (none, whole, full))


def board(tmp_path, records):
    """The report of these records: a table with a row for each, and a figure with a point for each."""
    page, folder = tmp_path / "table.md", tmp_path / "figures"
    assert report([str(tmp_path / "results"), "--markdown", str(page), "--png", str(folder)]) == 0
    text = page.read_text()
    assert text.count("### Reuse: random/llama · rag") == 1 and "chunks in memory" in text
    rows = [line for line in text.split("### Reuse")[1].splitlines() if line.startswith(("| cacheblend", "| full"))]
    assert [row.split(" | ")[1] for row in rows] == ["0", "1", "1"]
    assert all(f"{record['metrics.kl']:.2g}" in text for record in records)
    (figure,) = folder.glob("*-reuse.png")
    assert figure.stat().st_size > 10_000 and not list(folder.glob("*-budget.png"))


def test_a_ratio_is_read_as_settings_write_it():
    found = [reuse.ratio({"variant": CacheBlend(ratio=ratio).variant()}) for ratio in (0.0, 0.00001, 0.25, 1.0)]
    assert found == [0.0, 0.00001, 0.25, 1.0]
    blended = SnapKV(budget=0.5, prefill=CacheBlend(ratio=0.3).make_prefill())
    row = {"method": "snapkv", "variant": blended.variant()}
    assert reuse.ratio(row) == 0.3 and "prefill.ratio" in row["variant"]
    assert reuse.name(row) == "snapkv prefill=cacheblend"
