"""Texts, prompts, data sets and answers, and the contract of a task.

Imports `measure` and lower wings."""
