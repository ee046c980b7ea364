"""SQuAD and HotpotQA files: questions with the documents that answer them, as RULER's qa tasks read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvcompress.data import jsonl


@dataclass(frozen=True)
class Question:
    """A question, its answers, the documents that hold them, and documents of the same article."""

    query: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    more: tuple[int, ...] = ()


@lru_cache(maxsize=4)
def read_questions(path: Path, reader: str) -> tuple[tuple[Question, ...], tuple[str, ...]]:
    """Questions and all documents of a SQuAD 2.0 or HotpotQA (distractor) development file, as JSON.

    Raises:
        ValueError: no such file, no JSON, or other fields than those of the data set.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    data = jsonl.loads(text, f"cannot read {path}")
    try:
        questions, documents = (_squad if reader == "squad" else _hotpotqa)(data)
        for number, question in enumerate(questions, 1):
            where = f"question {number}"
            jsonl.whole(question.query, "question", where)
            jsonl.answers(question.answers, "answers", where)
        for number, document in enumerate(documents, 1):
            jsonl.whole(document, "context", f"document {number} in the order of their texts")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no {reader} file: {type(error).__name__} {error}") from error
    if not questions:
        raise ValueError(f"{path} holds no question that has an answer")
    return tuple(questions), tuple(documents)


def _squad(data: Any) -> tuple[list[Question], list[str]]:
    documents = sorted({p["context"] for article in data["data"] for p in article["paragraphs"]})
    at = {document: i for i, document in enumerate(documents)}
    questions = []
    for article in data["data"]:
        here = [at[p["context"]] for p in article["paragraphs"]]
        for p in article["paragraphs"]:
            own = at[p["context"]]
            more = tuple(i for i in here if i != own)
            for qa in p["qas"]:
                if not qa.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in qa["answers"])
                    questions.append(Question(qa["question"], answers, (own,), more))
    return questions, documents


def _hotpotqa(data: Any) -> tuple[list[Question], list[str]]:
    def written(row: Any) -> list[str]:
        return [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]]

    documents = sorted({document for row in data for document in written(row)})
    at = {document: i for i, document in enumerate(documents)}
    questions = [
        Question(row["question"], (row["answer"],), tuple(at[document] for document in written(row))) for row in data
    ]
    return questions, documents
