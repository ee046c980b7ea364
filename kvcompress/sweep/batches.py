"""Batches of samples: which samples are rows of one batch, and the result of each row.

Rows are padded on the left, where no method sees it, so that each gets what it would get alone (up to rounding: a
token may differ where two logits are nearly equal).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcompress.data.task import TIMES, Sample, Task, ended_by_force, merged
from kvcompress.method import Method

ORDERS = ("single", "independent")


def cannot_batch(task: Task, method: Method) -> str | None:
    """Why samples of a task cannot be rows of a batch under a method, or None if they can."""
    reason = task.cannot_batch()
    if reason is None and method.parts().prefill.name != "oneshot":
        return f"prefill={method.parts().prefill.name} parts a padded row elsewhere than one alone"
    return reason


def bytes_per_token(model: Any) -> int:
    """Keys and values of one token in an uncompressed cache, in bytes, by the model's configuration.

    Sliding layers are counted as if they held all they saw: an upper bound.
    """
    config = model.config.get_text_config()
    latent = getattr(config, "kv_lora_rank", None)
    if latent:  # MLA: one latent and one rotated key for all heads
        return config.num_hidden_layers * (latent + config.qk_rope_head_dim) * model.dtype.itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize


def alike(sample: Sample, same_lengths: bool) -> tuple[Any, ...]:
    """Key of samples that fit one batch: form of their questions, and how their answers end."""
    turns = [
        (bool(turn.ids), len(turn.ids) if same_lengths else 0, turn.max_new_tokens, turn.stop, turn.min_new_tokens)
        for turn in sample.turns
    ]
    return sample.order, sample.protocol.get("question"), tuple(turns)


def plan(
    samples: Sequence[Sample], size: int, memory: int | None, token_bytes: int, same_lengths: bool = False
) -> list[list[Sample]]:
    """Samples in batches of similar length, the longest first: if memory runs out, it does at once.

    Args:
        size: samples in a batch at most.
        memory: bytes that the keys and values of a batch may take uncompressed, question and answer included, each row
            as long as the longest; None for no limit. A sample that needs more by itself is a batch of its own.
        token_bytes: keys and values of one token in one row.
        same_lengths: only samples whose questions have equally many tokens, for models whose sliding windows would
            count the padding between context and question.
    """
    kinds: dict[Any, list[Sample]] = {}
    for number, sample in enumerate(samples):
        key = alike(sample, same_lengths) if sample.order in ORDERS else number
        kinds.setdefault(key, []).append(sample)
    batches: list[list[Sample]] = []
    for kind in kinds.values():
        batch: list[Sample] = []
        longest = 0
        for sample in sorted(kind, key=lambda one: -sum(map(len, one.segments))):
            need = max(longest, sample.total_tokens()) * (len(batch) + 1) * token_bytes
            if batch and (len(batch) == size or (memory is not None and need > memory)):
                batches.append(batch)
                batch, longest = [], 0
            batch = [*batch, sample]
            longest = max(longest, sample.total_tokens())
        batches.append(batch)
    return batches


def padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids `[B, n]` padded on the left with 0, and their mask `[B, n]`, None where no row is padded."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :] = torch.tensor(row, dtype=torch.long)
        mask[number, width - len(row) :] = 1
    return ids, None if bool(mask.all()) else mask


def run(session: Any, samples: Sequence[Sample]) -> list[dict[str, Any] | ValueError]:
    """Results of samples run as rows of one batch, as of `Task.run` but without times and memory, which are the batch's.

    A sample whose logits became NaN has an error in its place; its neighbours are as alone.
    """
    device, rows = session.model.device, range(len(samples))

    def on_device(part: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids, mask = padded(part)
        return ids.to(device), None if mask is None else mask.to(device)

    session.prefill(*on_device([[token for segment in sample.segments for token in segment] for sample in samples]))
    compressed = [session.report(row, kept_map=True) for row in rows]
    held, last = session.cache, len(samples[0].turns) - 1
    answers: list[Any] = []
    ends: list[list[dict[str, Any]]] = []
    for number, turn in enumerate(samples[0].turns):
        session.cache = held.fork() if number < last else held
        if turn.ids:
            session.append(*on_device([sample.turns[number].ids for sample in samples]))
        guides = [guide for sample in samples for guide in sample.turns[number].guides()]
        answers.append(
            session.generate(turn.max_new_tokens, stop=turn.stop, min_new_tokens=turn.min_new_tokens, guides=guides)
        )
        ends.append([session.report(row) for row in rows])
    return [
        ValueError(f"sample {samples[row].id!r}: its logits are NaN")
        if any(answer.finished[row] == "nan" for answer in answers)
        else {
            "tokens": [[int(token) for token in answer.tokens[row]] for answer in answers],
            "finished": [answer.finished[row] for answer in answers],
            "compressed": {**compressed[row], "time": None},
            "end": {**merged([turn[row] for turn in ends]), "time": None},
            **dict.fromkeys(TIMES),
            **{name: values[row :: len(rows)] for name, values in ended_by_force(answers).items()},
        }
        for row in rows
    ]
