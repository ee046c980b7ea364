"""Attention kernels: tensors in, tensors out. They give what SDPA does not, such as attention probabilities and their sums."""
