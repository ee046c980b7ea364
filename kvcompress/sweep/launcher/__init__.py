"""How cells are run: what a cell is, which share a prefill, locks between processes, and Hydra's launcher."""
