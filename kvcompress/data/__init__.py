"""Data sets, prompts as token ids, grading, and the base class of a task.

Imports `measure` and lower wings."""
