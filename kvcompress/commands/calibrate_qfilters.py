"""Compute the filters of QFilters for a model, once; they are then found by its weights.

kvcompress calibrate-qfilters --model smollm2                    on text that the model writes itself
kvcompress calibrate-qfilters --model NAME --text FILE           on a text file of yours
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

from kvcompress.commands.program import program


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("calibrate-qfilters"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="embedded name, Hub id, path or random/<architecture>")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps or auto")
    parser.add_argument("--text", type=Path, default=None, help="UTF-8 file; default: the model's own text")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the model's own text")
    parser.add_argument("--top-p", type=float, default=0.95, help="of the model's own text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="file; default: NAME.safetensors in the user's folder")
    return parser.parse_args(arguments)


def read(path: Path, tokenizer: Any, args: argparse.Namespace) -> Any:
    """The first `sequences` pieces of `length` tokens of a file, `[sequences, length]`; fewer if it is shorter."""
    import torch

    ids = torch.tensor(tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    count = min(args.sequences, len(ids) // args.length)
    if count == 0:
        raise ValueError(f"{path} has {len(ids)} tokens, fewer than --length {args.length}: lower it")
    return ids[: count * args.length].view(count, args.length)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    from kvcompress import load
    from kvcompress.calibrate import calibration, query_filters

    try:
        model, tokenizer = load(args.model, dtype=args.dtype, device=args.device, seed=args.seed)
        if args.text is None:
            start = getattr(tokenizer, "bos_token_id", None)
            start = model.config.get_text_config().bos_token_id if start is None else start
            sampling = (start, args.temperature, args.top_p)
            ids = calibration.own_text(model, args.sequences, args.length, args.seed, *sampling).cpu()
            text = f"by the model, temperature {args.temperature}, top-p {args.top_p}, seed {args.seed}"
        else:
            ids, text = read(args.text, tokenizer, args), args.text.name
        filters = query_filters.calibrate(model, ids.split(1))
    except (OSError, ValueError) as error:
        print(f"calibrate_qfilters: {error}", file=sys.stderr)
        return 1
    given = sys.argv[1:] if arguments is None else arguments
    provenance = {
        "model": args.model,
        "text": text,
        "ids_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "tokens": list(ids.shape),
        **calibration.made("calibrate-qfilters", given),
    }
    name = args.model.strip("/").replace("/", "--")
    out = args.out or calibration.folders(query_filters.KIND, query_filters.DATA)[0] / f"{name}.safetensors"
    calibration.save(out, model, {"filters": filters}, provenance)
    print(f"{out}: {len(filters)} layers of {filters.shape[1]} KV heads, from {ids.shape[0]} x {ids.shape[1]} tokens")
    return 0
