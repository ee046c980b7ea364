"""What is measured once per model and kept in a file: low-rank bases, head classes, head profiles.

Imports `data` and lower wings."""
