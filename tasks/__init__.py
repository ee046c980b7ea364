"""Benchmark tasks, one file each."""
