"""lm-eval's tasks on a compressed model, beside lm-eval's own model class; tasks and data are made here."""

import importlib.util
import json
import logging
import shutil
from functools import cache
from pathlib import Path

import pytest
from helpers import LONG
from small_models import small_model
from sweeps import ALONE, SHARED, sweep
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvcompress import load
from kvcompress.methods import H2O, Random, SnapKV
from kvcompress.sweep import components, config
from kvcompress.sweep.launcher.model_pool import ModelPool
from kvcompress.tasks import LMEval

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'kvcompress[eval]'")

import lm_eval  # noqa: E402
from lm_eval import evaluator  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from kvcompress.data import lm_eval_index
from kvcompress.data.lm_eval_encoding import Encoding
from kvcompress.lm_eval import CompressedLM

THINGS = ("river", "stone", "apple", "violin", "cloud", "tiger")
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
WRITE = """
output_type: generate_until
doc_to_text: "{{question}}\\nAnswer:"
doc_to_target: "{{things[0]}}"
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}
"""
TASKS = {
    "own_choice": CHOICE + 'doc_to_text: "{{question}}\\nAnswer:"\nmetadata: {version: 2}',
    # one letter decides; the border of context and continuation lies inside words and behind spaces
    "own_letter": CHOICE
    + 'doc_to_text: "{{question}} A, B or C? "\ndoc_to_choice: ["A", "B", "C"]\ntarget_delimiter: ""',
    "own_border": CHOICE
    + """doc_to_text: "The {{things[0][:3]}}"
doc_to_choice: "{{[things[0][3:] ~ ' tree. What does it hold?', things[1] ~ ' tree', ' ' ~ things[2]]}}"
target_delimiter: \"\"""",
    "own_empty": CHOICE + 'doc_to_text: ""\ntarget_delimiter: ""',
    "own_inputs": CHOICE
    + 'doc_to_text: gold\ndoc_to_choice: "{{choices}}"\ndoc_to_target: " it lies {{things[2]}} here"',
    "own_write": WRITE + 'generation_kwargs: {until: ["e", "."], max_gen_toks: 9}',
    "own_long": WRITE + "generation_kwargs: {until: [], max_gen_toks: 20}",
    "own_filters": WRITE
    + """generation_kwargs: {until: ["\\n"], max_gen_toks: 5}
filter_list:
  - {name: first, filter: [{function: take_first}]}
  - {name: letters, filter: [{function: regex, regex_pattern: "([a-z]+)"}, {function: take_first}]}""",
    "own_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
""",
}
SCORED = ("own_choice", "own_letter", "own_border", "own_empty", "own_inputs")
WRITTEN = ("own_write", "own_long", "own_filters")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder of our own tasks and their data."""
    import datasets.config

    folder = tmp_path_factory.mktemp("own")
    rows = []
    for number in range(4):
        things = [THINGS[(number + step) % 6] for step in (0, 2, 3)]
        rain = "It is raining on the roof. " * (2 + number)
        rows.append(
            {
                "question": f"The box holds a {things[0]}. {rain}What does the box hold?",
                "things": things,
                "choices": [things[0][3:], things[1], f"{things[2]} tree"],
                "gold": number % 3,
            }
        )
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source(folder / 'data.jsonl')}{text}\n")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "both.yaml").write_text(
        "group: own_both\ntask: [own_choice, own_letter]\naggregate_metric_list:\n  - {metric: acc, weight_by_size: true}\n"
    )
    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    patch.setattr(evaluator, "add_env_info", lambda results: None)  # asks the machine for seconds
    patch.setattr(lm_eval_index, "manager", cache(lm_eval_index.manager.__wrapped__ if LONG else few_published))
    yield folder
    patch.undo()


def few_published(include_path, published=True):
    """An index of one's own tasks and one published: that of all 14,000 takes a dozen seconds, and is for `--long`."""
    places = [include_path] if include_path else []
    places += [str(Path(lm_eval.tasks.__file__).parent / "hellaswag")] if published else []
    return TaskManager(include_path=places, include_defaults=False)


def source(path):
    return f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {path}}}}}\ntest_split: test\n"


@pytest.fixture(scope="module")
def manager(own):
    return TaskManager(include_path=str(own), include_defaults=False)


def merging_tokenizer():
    """Merges letters across what a task takes for a border; no token begins a text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    words = [f"The box holds a {thing} tree. What does the box hold?\nAnswer: {thing}" for thing in THINGS] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator([*words, "It is raining on the roof. A, B or C?"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="module")
def plain():
    return load("random/llama")


@pytest.fixture(scope="module", params=["bytes with a first token", "merges without one"])
def loaded(request, plain):
    if request.param.startswith("bytes"):
        return plain
    tokenizer = merging_tokenizer()
    return small_model("llama", vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0), tokenizer


def evaluated(lm, manager, tasks, limit=2, **options):
    """Results, and of each document lm-eval's responses."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    found = lm_eval.simple_evaluate(
        lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, limit=limit, **options
    )
    responses = {
        name: [row["resps"] for row in sorted(rows, key=lambda row: (row["filter"], row["doc_id"]))]
        for name, rows in found["samples"].items()
    }
    return found["results"], responses


def same(ours, theirs):
    """Log-likelihoods within 1e-4, everything else equal."""
    assert ours.keys() == theirs.keys()
    for name, rows in ours.items():
        for mine, other in zip(rows, theirs[name], strict=True):
            for (one,), (two,) in zip(mine, other, strict=True):
                if isinstance(two, tuple):
                    assert one[0] == pytest.approx(two[0], abs=1e-4), name
                    assert one[1] == two[1], name
                elif isinstance(two, float):
                    assert one == pytest.approx(two, rel=1e-5), name
                else:
                    assert one == two, name


# ---------------------------------------------------------------------- the model class


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"num_fewshot": 2}, marks=pytest.mark.long), {"apply_chat_template": True}], ids=str
)
def test_nothing_dropped_equals_lm_evals_own_model(loaded, manager, options):
    model, tokenizer = loaded
    if options.get("apply_chat_template") and tokenizer.chat_template is None:
        pytest.skip("this tokenizer has no chat template")
    names = (*SCORED, *WRITTEN) if not options else ("own_choice", "own_letter", "own_write")
    ours = evaluated(CompressedLM(model, tokenizer=tokenizer), manager, names, **options)
    theirs = evaluated(HFLM(pretrained=model, tokenizer=tokenizer), manager, names, **options)
    same(ours[1], theirs[1])
    assert ours[0] == theirs[0]


def test_requests_longer_than_the_model_are_cut_as_lm_evals_own_model_cuts_them(loaded, manager):
    model, tokenizer = loaded
    names = ("own_text", "own_choice", "own_write")
    ours = evaluated(CompressedLM(model, tokenizer=tokenizer, max_length=24), manager, names)
    theirs = evaluated(HFLM(pretrained=model, tokenizer=tokenizer, max_length=24), manager, names)
    same(ours[1], theirs[1])


@pytest.mark.model
@pytest.mark.long
def test_smollm2_with_nothing_dropped_equals_lm_evals_own_model(smollm2, manager):
    model, tokenizer = smollm2
    names = ("own_choice", "own_border", "own_empty", "own_write")
    ours = evaluated(CompressedLM(model, tokenizer=tokenizer), manager, names)
    theirs = evaluated(HFLM(pretrained=model, tokenizer=tokenizer), manager, names)
    same(ours[1], theirs[1])
    assert ours[0] == theirs[0]


def test_dropping_all_but_one_token_changes_every_likelihood_and_is_in_the_results(plain, manager):
    model, tokenizer = plain
    names = ("own_choice", "own_letter")
    full, lm = CompressedLM(model, tokenizer=tokenizer), CompressedLM(model, Random(budget=1), tokenizer)
    ours, theirs = evaluated(lm, manager, names)[1], evaluated(full, manager, names)[1]
    for name in names:
        for mine, other in zip(ours[name], theirs[name], strict=True):
            assert all(abs(one[0] - two[0]) > 1e-3 for (one,), (two,) in zip(mine, other, strict=True))
    assert full.summary()["share_inactive"] == 1.0
    assert lm.get_model_info()["share_inactive"] == 0.0
    assert lm.get_model_info()["kv.ratio"] < 0.1


def test_a_long_text_is_scored_by_methods_that_act_in_decode_and_refused_for_others(plain, manager):
    model, tokenizer = plain
    full = evaluated(CompressedLM(model, tokenizer=tokenizer), manager, ["own_text"], limit=1)[1]
    ours = evaluated(CompressedLM(model, H2O(budget=4), tokenizer), manager, ["own_text"], limit=1)[1]
    assert all(abs(one[0][0] - two[0][0]) > 0.1 for one, two in zip(ours["own_text"], full["own_text"], strict=True))
    with pytest.raises(ValueError, match="SnapKV compresses when a prompt ends"):
        evaluated(CompressedLM(model, SnapKV(budget=40), tokenizer), manager, ["own_text"])


def test_a_model_is_made_by_name_from_lm_evals_arguments(manager):
    arguments = "pretrained=random/llama,method=snapkv,budget=8,window=3,device=cpu"
    found = lm_eval.simple_evaluate(
        "kvcompress", model_args=arguments, tasks=["own_choice"], task_manager=manager, limit=1
    )
    assert found["config"]["method"]["window"] == 3
    assert 0 < found["config"]["kv.ratio"] < 0.2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": "snapvk"}, "method='snapvk' is unknown; valid: .*snapkv"),
        ({"method": "snapkv", "windows": 3}, "method=snapkv: .*windows"),
        ({"method": SnapKV(), "budget": 8}, "budget: settings of the method"),
        ({"held_back": -1}, "held_back=-1"),
        ({"bugdet": 0.5}, "bugdet: no argument"),
    ],
    ids=str,
)
def test_wrong_arguments_of_the_model_class_are_refused_before_a_model_is_loaded(arguments, said):
    with pytest.raises(ValueError, match=said):
        CompressedLM("no/such-model", **arguments)


def test_settings_of_generation_that_are_not_available_are_named():
    encoding = Encoding(merging_tokenizer())
    with pytest.raises(ValueError, match=r"\{'num_beams': 4\} are not available.*until"):
        encoding.completion("a", {"until": [], "num_beams": 4})
    with pytest.raises(ValueError, match="max_gen_toks=64 leaves no room"):
        Encoding(merging_tokenizer(), 32).completion("a", {"max_gen_toks": 64})
    with pytest.raises(ValueError, match="set max_length"):
        encoding.windows("a text")
    with pytest.raises(ValueError, match="adds no token"):
        encoding.pair("a", "")
    sampled = encoding.completion("a", {"do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert (sampled.temperature, sampled.top_p) == (0.7, 0.9)


# ---------------------------------------------------------------------- the task


def composed(folder, own, *overrides, tasks="own_choice,own_write"):
    """A cell whose record goes to `folder`."""
    with config.composing() as compose:
        short = ("model=random", "device=cpu", "paths.data=null", "sweep.name=test", f"paths.results={folder}")
        return compose(["task=lm_eval", f"task.tasks=[{tasks}]", f"task.include_path={own}", *short, *overrides])


def rows_of(outcome):
    return [json.loads(line) for line in (outcome.folder / "samples.jsonl").read_text().splitlines()]


def test_a_run_leaves_lm_evals_own_numbers_in_the_record(own, manager, tmp_path):
    names = ("own_choice", "own_inputs", "own_filters", "own_text")
    (outcome,), _ = sweep([composed(tmp_path, own, "task.max_length=400", tasks=",".join(names))])
    assert outcome.status == "ok"
    model, tokenizer = load("random/llama")
    results, responses = evaluated(HFLM(pretrained=model, tokenizer=tokenizer, max_length=400), manager, names, limit=4)
    for name in names:
        expected = {k: v for k, v in results[name].items() if "," in k and "stderr" not in k}
        assert {k: outcome.record[f"metrics.{name}.{k}"] for k in expected} == pytest.approx(expected, rel=1e-5)
        assert outcome.record[f"metrics.{name}.documents"] == 4
    rows = rows_of(outcome)
    assert [row["meta"]["task"] for row in rows[:4]] == list(names)  # by turns
    mine = {name: [row["out"]["responses"] for row in rows if row["meta"]["task"] == name] for name in names}
    for found, expected in zip(mine["own_choice"], responses["own_choice"], strict=True):
        assert [one[0][0] for one in found] == pytest.approx([one[0][0] for one in expected], abs=1e-4)
    for found, expected in zip(mine["own_filters"], responses["own_filters"], strict=False):
        assert found == expected
    texts = [row for row in rows if row["meta"]["task"] == "own_text"]
    assert all(0 < row["score"] < 1 for row in texts)
    assert outcome.record["metrics.own_choice.score_is"] == "acc,none"
    assert outcome.record["metrics.own_text.score_is"] == "word_perplexity,none"
    assert rows[0]["meta"]["prompt_last"].endswith("What does the box hold?\nAnswer:")
    assert rows[0]["references"] == [["0"]]


def test_errors_of_metrics_and_values_of_groups_are_lm_evals(own, manager, tmp_path):
    (outcome,), _ = sweep([composed(tmp_path, own, tasks="own_both")])
    model, tokenizer = load("random/llama")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    lm = HFLM(pretrained=model, tokenizer=tokenizer)
    expected = lm_eval.simple_evaluate(lm, tasks=["own_both"], task_manager=manager)
    for name in ("own_choice", "own_letter", "own_both"):
        for key in ("acc,none", "acc_stderr,none"):
            assert outcome.record[f"metrics.{name}.{key}"] == pytest.approx(expected["results"][name][key])


def test_examples_before_a_document_are_those_lm_eval_draws(own, manager, tmp_path):
    task = composed(tmp_path, own, "task.num_fewshot=2", tasks="own_choice,own_write")
    _, tokenizer = load("random/llama")
    samples = list(components.build_task(task).samples(tokenizer))
    for name, theirs in manager.load(["own_choice", "own_write"])["tasks"].items():
        theirs.set_config("num_fewshot", 2)
        theirs.set_fewshot_seed(1234)
        theirs.build_all_requests()
        contexts = list(dict.fromkeys(request.args[0] for request in theirs.instances))
        mine = [sample.asked[0][0].context for sample in samples if sample.meta["task"] == name]
        assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in mine] == contexts
    again = list(components.build_task(task).samples(tokenizer))
    assert [sample.asked for sample in again] == [sample.asked for sample in samples]


def test_a_method_that_drops_all_but_one_token_changes_the_scores_of_the_task(own, tmp_path):
    made = [composed(tmp_path, own, "limit=4", *method, tasks="own_choice,own_letter") for method in (
        ("method=full",), ("method=random", "budget=1"), ("method=knorm", "budget=1"),
    )]  # fmt: skip
    full, *others = sweep(made, ALONE)[0]
    for other in others:
        assert other.status == "ok" and other.record["share_inactive"] == 0.0
        for mine, theirs in zip(rows_of(other), rows_of(full), strict=True):
            pairs = zip(mine["out"]["responses"], theirs["out"]["responses"], strict=True)
            assert all(abs(one[0][0] - two[0][0]) > 1e-3 for one, two in pairs)


def test_cells_that_share_a_prefill_score_as_they_do_alone(own, tmp_path):
    def responses(options, folder):
        made = [composed(folder, own, f"method={name}", "budget=20", "limit=2") for name in ("full", "random", "knorm")]
        outcomes = sweep(made, options)[0]
        return [o.record["protocol.shared"] for o in outcomes], [
            [row["out"]["responses"] for row in rows_of(outcome)] for outcome in outcomes
        ]

    alone, shared = responses(ALONE, tmp_path / "alone"), responses(SHARED, tmp_path / "shared")
    assert (alone[0], shared[0]) == ([False] * 3, [True] * 3)
    flat = [numbers(cells) for cells in (alone[1], shared[1])]
    assert flat[0] == pytest.approx(flat[1], abs=1e-4)


def numbers(value):
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [float(value)] if not isinstance(value, str) else [float(len(value)), *map(float, value.encode())]


def test_what_is_finished_of_a_task_is_not_asked_again(own, tmp_path, monkeypatch):
    (outcome,), _ = sweep([composed(tmp_path, own)])
    before, file = outcome.record, outcome.folder / "samples.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:5]) + "\n" + lines[5][:40])
    (outcome.folder / "record.json").unlink()
    asked, run = [], LMEval.run
    monkeypatch.setattr(
        LMEval, "run", lambda self, session, sample: asked.append(sample.id) or run(self, session, sample)
    )
    (again,), _ = sweep([composed(tmp_path, own)])
    assert asked == [json.loads(line)["id"] for line in lines[5:]]
    kept = {key for key in before if key.startswith(("score", "metrics.", "kv.", "n_samples", "run_id"))}
    assert {key: again.record[key] for key in kept} == {key: before[key] for key in kept}


def test_the_run_id_changes_with_data_and_yaml_and_not_with_the_place(own, tmp_path):
    def run_id(folder):
        tasks = composed(tmp_path, folder, tasks="own_write")
        return components.build_task(tasks).fingerprint()

    other = tmp_path / "elsewhere"
    other.mkdir()
    shutil.copy(own / "data.jsonl", other)
    yaml = (own / "own_write.yaml").read_text().replace(str(own), str(other))
    (other / "own_write.yaml").write_text(yaml)
    assert run_id(other) == run_id(own)
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed" / "own_write.yaml").write_text(yaml.replace("Answer:", "It is"))
    assert run_id(tmp_path / "changed") != run_id(own)
    (tmp_path / "fewer").mkdir()
    (tmp_path / "fewer" / "data.jsonl").write_text("".join((own / "data.jsonl").read_text().splitlines(True)[:3]))
    (tmp_path / "fewer" / "own_write.yaml").write_text(yaml.replace(str(other), str(tmp_path / "fewer")))
    assert run_id(tmp_path / "fewer") != run_id(own)


def refused(configuration, monkeypatch):
    """Why a cell is refused; no model may be loaded."""
    monkeypatch.setattr(ModelPool, "load", lambda *a: pytest.fail("a model was loaded"))
    (outcome,), _ = sweep([configuration])
    assert outcome.status == "refused"
    return outcome.note


def test_without_lm_eval_the_task_names_the_extra(own, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a))
    assert "pip install 'kvcompress[eval]'" in refused(composed(tmp_path, own), monkeypatch)


def test_an_unknown_task_is_refused_with_the_names_near_it(own, tmp_path, monkeypatch):
    note = refused(composed(tmp_path, own, tasks="own_choise"), monkeypatch)
    assert "no task 'own_choise'" in note and "own_choice" in note
    note = refused(composed(tmp_path, own, tasks="helaswag"), monkeypatch)
    assert "hellaswag" in note and "task.include_path" in note


def test_missing_data_is_said_with_where_it_was_looked_for(own, tmp_path, monkeypatch):
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "file.yaml").write_text(f"task: file\n{source('/no/such/file.jsonl')}{WRITE}")
    hub = "task: hub\ndataset_path: no-such-owner/no-such-data\ntest_split: test\n"
    (tmp_path / "hub.yaml").write_text(hub + WRITE)
    note = refused(composed(tmp_path, tmp_path, tasks="file"), monkeypatch)
    assert "looked for" in note and "/no/such/file.jsonl" in note
    note = refused(composed(tmp_path, tmp_path, tasks="hub"), monkeypatch)
    assert "the Hub's no-such-owner/no-such-data" in note and "cannot be loaded" in note


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"tasks": ""}, "task.tasks is empty"),
        ({"overrides": ["task.template=chatty"]}, "valid: auto, chat, none"),
        ({"overrides": ["task.held_back=-1"]}, "task.held_back=-1"),
        ({"overrides": ["task.include_path=/no/such/folder"]}, "'/no/such/folder' is no folder"),
        ({"overrides": ["task.scale=0"]}, "task.scale=0"),
    ],
    ids=str,
)
def test_wrong_settings_of_the_task_are_refused_before_a_model_is_loaded(own, tmp_path, monkeypatch, overrides, said):
    overrides = dict(overrides)
    assert said in refused(composed(tmp_path, own, *overrides.pop("overrides", ()), **overrides), monkeypatch)


def test_tasks_that_run_written_code_or_show_images_are_refused(own, tmp_path, monkeypatch):
    data = source(own / "data.jsonl")
    (tmp_path / "code.yaml").write_text(f"task: code\n{data}{WRITE}unsafe_code: true\n")
    (tmp_path / "image.yaml").write_text(f'task: image\n{data}{WRITE}doc_to_image: "things"\n')
    assert "task.unsafe_code=true" in refused(composed(tmp_path, tmp_path, tasks="code"), monkeypatch)
    assert "images or sound" in refused(composed(tmp_path, tmp_path, tasks="image"), monkeypatch)


def test_the_score_is_the_metric_that_is_asked_for(own, tmp_path):
    one = ("limit=2", "method=full")
    scores = {}
    for name in ("auto", "acc_norm", '"acc,none"'):
        (outcome,), _ = sweep([composed(tmp_path, own, *one, f"task.score_by={name}", tasks="own_choice")])
        scores[name] = outcome.record["metrics.own_choice.score_is"]
    assert scores == {"auto": "acc,none", "acc_norm": "acc_norm,none", '"acc,none"': "acc,none"}
    (outcome,), _ = sweep([composed(tmp_path, own, *one, "task.score_by=f1", tasks="own_choice")])
    assert outcome.status == "failed" and "has acc,none, acc_norm,none" in outcome.note


def test_a_chat_template_wraps_what_is_asked_and_is_in_the_record(own, tmp_path):
    setting = ("limit=1", "task.template=chat", "task.system=Be brief.")
    (outcome,), _ = sweep([composed(tmp_path, own, *setting, tasks="own_write")])
    (row,) = rows_of(outcome)
    assert row["meta"]["prompt_first"].startswith("<bos><turn>system\nBe brief.<eos><turn>user\nThe box")
    assert row["meta"]["prompt_last"].endswith("<turn>assistant\n")
    assert outcome.record["protocol.template"] == "chat"


@pytest.mark.parametrize(
    ("written", "meant"), [("[a,b]", "[a,b]"), ("a", "[a]"), ("a,b_*", "[a],[b_*]")], ids=["list", "one", "sweep"]
)
def test_the_command_line_takes_tasks_without_their_group(written, meant):
    found = config.expand_suites(["task=lm_eval", f"tasks={written}", "method=full"], config.folder())
    assert found == ["task=lm_eval", f"task.tasks={meant}", "method=full"]


def test_a_score_of_a_document_is_between_0_and_1_whatever_the_metric():
    class Metrics:
        task_name = "t"

        def higher_is_better(self):
            return {"perplexity": False, "bleu": True, "mcc": True, "acc": True, "error": False}

        def aggregation(self):
            return {"perplexity": lambda v: 2.0 ** -v[0], "bleu": lambda v: 40.0, "error": lambda v: v[0]}

    def score(values, **settings):
        task = LMEval(tasks=("t",), **settings)
        return task._score(Metrics(), {(key, "none"): value for key, value in values.items()})

    assert score({"perplexity": -2.0}) == 0.25
    assert score({"perplexity": -2.0, "acc": 1}) == 1.0
    assert score({"bleu": ("a", "b")}) == 0.4
    assert [score({"mcc": pair}) for pair in ((1, 1), (0, 1))] == [1.0, 0.0]
    assert score({"error": 3.0}) == 0.25
    assert score({"acc": 4}, scale=5.0) == 0.8
    with pytest.raises(ValueError, match="acc,none is 4.0; a score is 0 to 1: set task.scale"):
        score({"acc": 4})
