"""Serving simulation, public name. The code is in `kvcompress/measure/serving_simulation.py`."""

from kvcompress.measure.serving_simulation import (
    Costs,
    Result,
    Served,
    highest_rate,
    poisson,
    saturated,
    serve,
    simulate,
)

__all__ = ["Costs", "Result", "Served", "highest_rate", "poisson", "saturated", "serve", "simulate"]
