"""Leaderboards and figures, made from records alone."""

from kvcompress.report.averages import rank
from kvcompress.report.frame import load

__all__ = ["load", "rank"]
