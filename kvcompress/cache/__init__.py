"""The compressed KV cache: what is held, layer by layer, in which layout, with positions and bytes.

Imports `models` and lower wings; it never calls a model."""
