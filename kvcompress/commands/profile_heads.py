"""Measure which KV heads of a model change their top pages fast, once; FlexiCache then finds the file by its weights.

kvcompress profile-heads --model smollm2                 on generated prose
kvcompress profile-heads --model NAME --text FILE        on a text file of yours
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from kvcompress.commands.program import program


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("profile-heads"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="embedded name, Hub id, path or random/<architecture>")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps or auto")
    parser.add_argument("--text", type=Path, default=None, help="UTF-8 file; default: generated prose")
    parser.add_argument("--texts", type=int, default=6, help="pieces of text")
    parser.add_argument("--prompt", type=int, default=1920, help="tokens of each that are the prompt")
    parser.add_argument("--steps", type=int, default=128, help="tokens of each that are decoded one by one")
    parser.add_argument("--pages", type=int, default=64, help="K, pages that a step reads")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--unstable", type=float, default=0.25, help="share of heads that counts as least stable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="file; default: NAME.safetensors in the user's folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    from kvcompress import load
    from kvcompress.calibrate import calibration, head_profile

    length = args.prompt + args.steps + 1
    try:
        model, tokenizer = load(args.model, dtype=args.dtype, device=args.device, seed=args.seed)
        if args.text is None:
            texts = head_profile.prose(tokenizer, args.texts, length, args.seed)
            source = f"generated prose, seeds {args.seed} to {args.seed + args.texts - 1}"
        else:
            texts = head_profile.pieces(tokenizer, args.text.read_text(encoding="utf-8"), args.texts, length)
            source = args.text.name
        tensors, said = head_profile.profile(
            model, texts, prompt=args.prompt, pages=args.pages, page_size=args.page_size, unstable=args.unstable
        )
    except (OSError, ValueError) as error:
        print(f"profile_heads: {error}", file=sys.stderr)
        return 1
    given = sys.argv[1:] if arguments is None else arguments
    provenance = {
        "model": args.model,
        "text": source,
        "ids_sha256": hashlib.sha256(b"".join(ids.numpy().tobytes() for ids in texts)).hexdigest(),
        **said,
        **calibration.made("profile-heads", given),
    }
    name = args.model.strip("/").replace("/", "--")
    folder = calibration.folders(head_profile.KIND, head_profile.DATA)[0]
    out = args.out or folder / f"{name}.safetensors"
    calibration.save(out, model, tensors, provenance)
    halves = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in said.get("halves", {}).items())
    print(
        f"{out}: {tensors['frequency'].numel()} KV heads, {said['windows']} windows; two halves: {halves or 'one window'}"
    )
    return 0
