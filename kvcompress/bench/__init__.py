"""Benchmarks of the library itself: overhead beside plain transformers, kernels, peers. Driven by `scripts/bench.py`."""
