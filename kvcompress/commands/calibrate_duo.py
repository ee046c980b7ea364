"""Measure which heads of a model retrieve, for DuoAttention and allocator=duo: one small file per model.

kvcompress calibrate-duo --model smollm2                                a file in kvcompress/calibrate/data/duoattention/
kvcompress calibrate-duo --model owner/name --device cuda --dtype bfloat16 --lengths 4000,8000 --out FILE
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from kvcompress.commands.program import program


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("calibrate-duo"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="embedded name, Hub id, path or random/<architecture>")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps or auto")
    parser.add_argument("--lengths", default="1000,2000", help="tokens per sample, comma-separated")
    parser.add_argument("--samples", type=int, default=8, help="samples per length")
    parser.add_argument("--passkeys", type=int, default=4, help="passkeys per sample")
    parser.add_argument("--words", type=int, default=12, help="words per passkey")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="file; default: NAME.json where methods look for it")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    from kvcompress import load
    from kvcompress.calibrate import calibration
    from kvcompress.calibrate.duo import FOLDER, calibrate

    try:
        model, tokenizer = load(args.model, dtype=args.dtype, device=args.device)
        found = calibrate(
            model,
            tokenizer,
            args.model,
            lengths=[int(n) for n in args.lengths.split(",")],
            samples=args.samples,
            passkeys=args.passkeys,
            words=args.words,
            seed=args.seed,
            note=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (OSError, ValueError) as error:
        print(f"calibrate_duo: {error}", file=sys.stderr)
        return 1
    given = sys.argv[1:] if arguments is None else arguments
    scores = found.pop("scores")
    found["made"] = calibration.made("calibrate-duo", given)
    out = args.out or FOLDER / f"{args.model.strip('/').replace('/', '--')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text_of(found, scores), encoding="utf-8")
    print(f"{out}: {len(scores)} layers of {len(scores[0])} KV heads; two halves agree: {found['halves']}")
    return 0


def text_of(found: dict[str, Any], scores: list[list[float]]) -> str:
    """JSON with a line per list of numbers and per layer of scores, so that a change can be read."""
    head = json.dumps(found, indent=1, ensure_ascii=False)[:-2]
    head = re.sub(r"\[[-+\d.,e\s]+\]", lambda numbers: " ".join(numbers[0].split()), head)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in scores)
    return f'{head},\n "scores": [\n{rows}\n ]\n}}\n'
