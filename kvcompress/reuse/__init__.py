"""Chunks and prefixes whose keys and values are stored and used again: KV store, prefix reuse, CacheBlend.

Imports `hook` and lower wings."""
