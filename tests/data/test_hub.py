"""Data sets of the Hub: a pinned commit, checked against what came, and rows in the published fields."""

from __future__ import annotations

import json

import datasets
import huggingface_hub
import pytest
from omegaconf import OmegaConf

from kvcompress.data import hub
from kvcompress.sweep import config
from kvcompress.tasks import TASKS
from kvcompress.tasks.longbench import official, settings

COMMIT, OTHER = "a" * 40, "b" * 40
ROW = {"input": "Office mail.", "question": "Where is Mary?", "target": "office"}
ON_HUB = [name for name, task in TASKS.items() if "revision" in task.__dataclass_fields__]


class Builder:
    """What `datasets` gives: the rows of one commit, whichever was asked for."""

    def __init__(self, commit=COMMIT):
        self.hash, self.asked = commit, []

    def __call__(self, repository, subset, revision):
        self.asked.append((repository, subset, revision))
        if self.hash is None:
            raise ConnectionError("Couldn't reach the Hub")
        return self

    def download_and_prepare(self):
        pass

    def as_dataset(self, split):
        return [ROW]


@pytest.fixture
def served(monkeypatch):
    def serve(commit):
        hub._load.cache_clear()
        hub._failed.clear()
        builder = Builder(commit)
        monkeypatch.setattr(datasets, "load_dataset_builder", builder)
        return builder

    yield serve
    hub._load.cache_clear()
    hub._failed.clear()


def test_every_data_set_on_the_hub_has_a_revision_in_its_yaml_and_those_without_a_known_commit_are_not_pinned():
    assert len(ON_HUB) == 21 + 5 + 12 + 12 + 4 + 10 + 2
    for name in ON_HUB:
        written = OmegaConf.load(config.folder() / "task" / f"{name}.yaml").revision
        assert written == TASKS[name]().revision
        assert hub.Source("a/b", None, "test", written).pinned == (
            not name.startswith(("babilong", "loogle", "zero_scrolls"))
        )


def test_rows_come_from_the_stated_revision_and_the_record_says_which_commit_that_was(served):
    builder = served(COMMIT)
    task = TASKS["babilong"]()
    assert task.fingerprint() == {"data": f"hub:RMT-team/babilong-1k-samples:1k:qa1@{COMMIT}", "records": 1}
    assert task.provenance()["revision"] == COMMIT and "revision" not in task.settings()
    assert builder.asked == [("RMT-team/babilong-1k-samples", "1k", "main")]
    assert TASKS["babilong"](revision=COMMIT).fingerprint() == task.fingerprint()


@pytest.mark.parametrize(
    ("name", "file"), [("infinitebench/passkey", "passkey.jsonl"), ("scbench/kv", "data/scbench_kv.jsonl")]
)
def test_one_file_of_a_repository_is_read_as_it_was_published(name, file, served, monkeypatch, tmp_path):
    """At the commit that was asked for, whose folder the Hub's cache names; values keep their types."""
    served(COMMIT)
    rows = {"context": "x", "input": "?", "answer": "7", "multi_turns": [{"input": "?", "answer": "7"}]}
    asked = []

    def download(repository, name, repo_type, revision):
        asked.append((repository, name, repo_type, revision))
        path = tmp_path / "snapshots" / revision / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows) + "\n")
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    task = TASKS[name]()
    assert task.fingerprint() == {"data": f"hub:{task.hub().repository}:{file}@{task.revision}", "records": 1}
    assert asked == [(task.hub().repository, file, "dataset", task.revision)]
    assert task.provenance()["revision"] == task.revision and task.rows()[0] == rows


def test_another_commit_from_the_cache_is_refused_where_one_is_pinned(served):
    served(OTHER)
    with pytest.raises(ValueError, match=f"commit {COMMIT} is wanted, but only {OTHER} is in the local cache"):
        hub.fetch(hub.Source("a/b", None, "test", COMMIT))
    assert hub.fetch(hub.Source("a/b", None, "test", "main")).revision == OTHER
    with pytest.raises(ValueError, match=r"babilong.*1k_qa1\.jsonl in paths.data \(not set\).*RMT-team.*only b+ is in"):
        TASKS["babilong"](revision=COMMIT).fingerprint()


def test_a_hub_that_cannot_be_reached_is_not_asked_again_for_every_cell(served, monkeypatch):
    builder = served(None)
    for name in ("babilong", "babilong", "reasoning/gsm8k", "reasoning/gsm8k", "longbench/qasper", "longbench_v2"):
        with pytest.raises(ValueError, match=rf"no data for {name}: looked for .*paths\.data.*Couldn't reach the Hub"):
            TASKS[name]().fingerprint()
    assert len(builder.asked) == 4
    monkeypatch.setattr(hub, "RETRY_S", 0)
    with pytest.raises(ValueError, match="Couldn't reach"):
        TASKS["babilong"]().fingerprint()
    assert len(builder.asked) == 5


PARTS = {  # what follows the context, the question, and the start of the answer, as the Hub's copy has them
    "hotpotqa": ("\n\nAnswer the question based on the given passages. Only give me the answer and do not output any other "
                 "words.\n\n", "Question: {input}\n", "Answer:"),
    "trec": ("\n", "{input}", "Type:"),
    "lcc": ("", "{input}", "Next line of code:\n"),
    "gov_report": ("\n\n", "Now, write a one-page summary of the report.\n\n", "Summary:"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PARTS))
@pytest.mark.parametrize("context", ["Some text.", " Odd ends.\n\n"])
def test_the_hubs_copy_of_longbench_makes_the_official_prompt(name, context):
    template = settings()[name]["template"]
    head = template.partition("{context}")[0]
    said = {"hotpotqa": "Who?", "trec": "Question: What is rust ?\nType:"}.get(name, "")
    end, question, prefix = PARTS[name]
    asked = question.format(input=said.removesuffix(prefix))
    row = {"context": f"{head}{context}{end}", "question": asked, "answer_prefix": prefix, "answers": ["x"]}
    made = official(row, template)
    assert template.format(context=made["context"], input=made["input"]) == row["context"] + asked + prefix
    assert (made["context"], made["input"]) == (context, said) and made["answers"] == ["x"]


def test_a_copy_with_other_prompts_is_refused_and_plain_rows_are_left_as_they_are():
    template = settings()["hotpotqa"]["template"]
    head = template.partition("{context}")[0]
    with pytest.raises(ValueError, match="its prompt ends in"):
        official({"context": head + "x", "question": "Question: Who?", "answer_prefix": "\nSay:"}, template)
    plain = {"context": "x", "input": "Who?"}
    assert official(plain, template) is plain
    assert official({"context": "x", "question": "Who?"}, template)["input"] == "Who?"
