"""Measures kvpress where it is installed, beside plain transformers of the same environment; `bench.py peers` starts it.

It imports nothing of kvcompress. Requests come line by line as JSON on standard input, an answer goes back for each:
`{"ids": [...]}` sets the prompt, `{"what": "prefill" or "decode", "press": null or "SnapKVPress", "options": {...},
"tokens": 32}` measures once and answers `{"seconds": ..., "bytes": ...}` of the cache after the prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from importlib import metadata


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer

    def say(answer: dict) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        worker = Worker(options)
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"versions": {name: metadata.version(name) for name in ("kvpress", "transformers", "torch")}})
    for line in sys.stdin:
        try:
            say(worker.answer(json.loads(line)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


class Worker:
    def __init__(self, options: argparse.Namespace) -> None:
        import kvpress  # type: ignore[import-not-found]  # there where this runs
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        self.torch, self.kvpress, self.DynamicCache = torch, kvpress, DynamicCache
        if options.threads:
            torch.set_num_threads(options.threads)
        dtype = getattr(torch, options.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
        self.ids = torch.zeros(1, 0, dtype=torch.long)
        self.caches: dict[str, DynamicCache] = {}

    def synchronize(self) -> None:
        if self.model.device.type == "cuda":
            self.torch.cuda.synchronize()

    def answer(self, asked: dict) -> dict:
        if "ids" in asked:
            self.ids = self.torch.tensor([asked["ids"]], device=self.model.device)
            self.caches.clear()
            return {"tokens": len(asked["ids"])}
        with self.torch.no_grad():
            if asked["what"] == "prefill":
                cache, seconds = self.prefill(asked)
            else:
                key = json.dumps([asked["press"], asked.get("options")])
                if key not in self.caches:
                    self.caches[key] = self.prefill(asked)[0]
                cache = self.caches[key]
                seconds = self.decode(copy.deepcopy(cache), asked["tokens"])
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        held = sum(part.numel() * part.element_size() for pair in layers for part in pair)
        return {"seconds": seconds, "bytes": held}

    def prefill(self, asked: dict):
        name = asked["press"]
        context = contextlib.nullcontext()
        if name is not None:
            context = getattr(self.kvpress, name)(**asked.get("options", {}))(self.model)
        self.synchronize()
        start = time.perf_counter()
        cache = self.DynamicCache(config=self.model.config)
        with context:
            self.model(input_ids=self.ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self.synchronize()
        return cache, time.perf_counter() - start

    def decode(self, cache, tokens: int) -> float:
        """Seconds per token; positions go on from the prompt's length, as kvpress's own pipeline has it."""
        token = self.torch.zeros(1, 1, dtype=self.torch.long, device=self.model.device)
        first = self.ids.shape[1]
        self.synchronize()
        start = time.perf_counter()
        for number in range(tokens):
            position = self.torch.tensor([[first + number]], device=self.model.device)
            output = self.model(input_ids=token, past_key_values=cache, position_ids=position, logits_to_keep=1)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
        self.synchronize()
        return (time.perf_counter() - start) / tokens


if __name__ == "__main__":
    main()
