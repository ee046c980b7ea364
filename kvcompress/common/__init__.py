"""Small helpers that know nothing of caches, models or tasks: atomic files, hashes, clocks. Any wing may import it."""
