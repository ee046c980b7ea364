"""Hydra configuration."""
