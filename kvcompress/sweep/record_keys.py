"""Statuses and keys that records, their schema and their readers share."""

FINISHED = ("ok", "inactive", "unscored")
STATUSES = ("ok", "failed", "oom", "inactive", "partial", "unscored")
TIMES = ("time.ttft_s", "time.tpot_s", "time.prefill_s", "time.compress_s")
