"""Attention kernels: what SDPA does not give, such as probabilities and their sums."""
