"""Function retrieval of SCBench's repository sets (RepoQA): which function of a repository an answer repeats.

Source: microsoft/MInference fb56c91, scbench/repo_qa_utils.py, after evalplus/repoqa. An answer's function is the first
that its first code block with one defines; without a code block all of the answer counts, and of blocks without a function
the first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvcompress.metrics.words import needs

THRESHOLD = 0.8  # of the similarity, as published
# tree-sitter grammar, its entry, and the kind of node that is a function
LANGUAGES: dict[str, tuple[str, str, str]] = {
    "python": ("tree_sitter_python", "language", "function_definition"),
    "java": ("tree_sitter_java", "language", "method_declaration"),
    "typescript": ("tree_sitter_typescript", "language_typescript", "function_declaration"),
    "rust": ("tree_sitter_rust", "language", "function_item"),
    "cpp": ("tree_sitter_cpp", "language", "function_definition"),
    "go": ("tree_sitter_go", "language", "function_declaration"),
}
BLOCK = re.compile(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", re.DOTALL | re.MULTILINE)


@lru_cache(maxsize=len(LANGUAGES))
def _parser(language: str) -> Any:
    package, entry, _ = LANGUAGES[language]
    tree_sitter, grammar = needs("tree_sitter", "code"), needs(package, "code")
    return tree_sitter.Parser(tree_sitter.Language(getattr(grammar, entry)()))


def _names(node: Any, language: str) -> bool:
    """True if a node defines a function that has a name."""
    if node.type != LANGUAGES[language][2]:
        return False
    if language != "cpp":
        return node.child_by_field_name("name") is not None
    declared = node.child_by_field_name("declarator")
    if declared is None or declared.type != "function_declarator":
        return False
    inner = declared.child_by_field_name("declarator")
    return inner is not None and inner.type == "identifier"


def _first_function(code: str, language: str) -> str | None:
    """Text of the first function in the order of the source, or None."""
    source = code.encode()
    waiting = [_parser(language).parse(source).root_node]
    while waiting:
        node = waiting.pop()
        if _names(node, language):
            return source[node.start_byte : node.end_byte].decode()
        waiting += reversed(node.children)
    return None


def answered_function(answer: str, language: str) -> str:
    """The function that an answer gives, as text."""
    answer = answer.strip()
    blocks = BLOCK.findall(answer)
    if not blocks:
        return answer
    return next((found for block in blocks if (found := _first_function(block, language)) is not None), blocks[0])


def similarity(candidate: str, reference: str) -> float:
    """BLEU-4 of words, smoothed by Chen and Cherry's fourth method."""
    bleu = needs("nltk.translate.bleu_score")
    words = [re.split(r"\s+", text.strip()) for text in (candidate, reference)]
    return float(bleu.sentence_bleu([words[1]], words[0], smoothing_function=bleu.SmoothingFunction().method4))


def function_found(answer: str, name: str, functions: Sequence[tuple[str, str]], language: str) -> float:
    """1 if of all functions the named one is the most similar, and similar enough (`THRESHOLD`).

    Args:
        functions: name and text of all that are asked of the repository; of equal ones the first wins.
    """
    said, best, most = answered_function(answer, language), None, 0.0
    for one, text in functions:
        found = similarity(said, text)
        if found > most:
            best, most = one, found
    return float(best == name and most >= THRESHOLD)


def checked(language: object, field: str) -> str:
    """A language whose functions can be told apart here.

    Raises:
        ValueError: an unknown one, or its grammar is not installed: before anything is run.
    """
    if language not in LANGUAGES:
        raise ValueError(f"{field}={language!r:.60}; valid: {', '.join(LANGUAGES)}")
    _parser(str(language))
    return str(language)
