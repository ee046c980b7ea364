"""The language in which a method is written: views, parts, budgets, and the class `Method`.

Everything that a file in `methods/` needs is exported here. Imports `common` alone.
"""

from kvcompress.method.budget import Budget
from kvcompress.method.codec import GroupedCodec, Slots
from kvcompress.method.method import ILLEGAL, Method
from kvcompress.method.parts import (
    Allocator,
    Chunked,
    Codec,
    OneShot,
    Parts,
    Plain,
    Prefill,
    ReadAll,
    Reader,
    Schedule,
    Scorer,
    Uniform,
)
from kvcompress.method.view import GroupReduce, LayerView, Needs, Observed, Pass, State, Tensor, reduce_group

__all__ = [
    "ILLEGAL",
    "Allocator",
    "Budget",
    "Chunked",
    "Codec",
    "GroupReduce",
    "GroupedCodec",
    "LayerView",
    "Method",
    "Needs",
    "Observed",
    "OneShot",
    "Parts",
    "Pass",
    "Plain",
    "Prefill",
    "ReadAll",
    "Reader",
    "Schedule",
    "Scorer",
    "Slots",
    "State",
    "Tensor",
    "Uniform",
    "reduce_group",
]
