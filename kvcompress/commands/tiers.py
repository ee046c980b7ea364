"""Command line of the offload cost model (`kvcompress/measure/offload_cost_model.py`)."""

from kvcompress.measure.offload_cost_model import main

__all__ = ["main"]
