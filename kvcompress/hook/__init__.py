"""How a model runs through a compressed cache: session, attention function, compression, decode steps.

Imports `cache` and lower wings."""
