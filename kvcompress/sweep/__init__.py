"""Configuration, launcher and records: from a command line to `record.json`.

Imports `methods`, `tasks` and lower wings."""
