"""What several metrics read texts with: punctuation of both scripts, F1 of multisets, packages that are optional."""

from __future__ import annotations

import importlib
import string
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

CJK_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
ASCII = str.maketrans("", "", string.punctuation)
BOTH = str.maketrans("", "", string.punctuation + CJK_PUNCTUATION)


def needs(package: str, extra: str = "metrics") -> Any:
    """An optional package, imported.

    Raises:
        ValueError: it is not installed; names what to install.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"this metric needs the package {package.partition('.')[0].replace('_', '-')!r}: "
            f"pip install 'kvcompress[{extra}]'"
        ) from error


def token_f1(prediction: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """F1 of the two multisets of tokens; 0 where nothing is shared."""
    shared = sum((Counter(prediction) & Counter(reference)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(reference)
    return 2 * precision * recall / (precision + recall)
