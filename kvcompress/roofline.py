"""Roofline of a decode step, public name. The code is in `kvcompress/measure/roofline.py`."""

from kvcompress.measure.roofline import Rates, Step, beside, between, of_report, rates, step, weights

__all__ = ["Rates", "Step", "beside", "between", "of_report", "rates", "step", "weights"]
