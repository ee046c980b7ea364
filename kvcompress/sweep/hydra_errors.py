"""Hydra's errors over a command line, in one line that names the override and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from kvcompress.common.budget_text import RATIO, kept_of
from kvcompress.sweep.config import GROUPS

HYDRA_ERRORS = (HydraException, OmegaConfBaseException)
NAMED = re.compile(r"(?:Error merging override |Could not override '|To append to your config use \+)([^'\n]+)")
BUDGET = "a budget is a share of the tokens, such as budget=0.25, or a number of tokens, such as budget=512"


def one_line(error: BaseException) -> str:
    """One line for what Hydra or OmegaConf raised over an override; what is not known is said in their first line."""
    texts = [str(one) for one in chain(error)]
    named = [found for text in texts for found in NAMED.findall(text)]
    override = max(named, key=len, default="")  # the key alone, or key=value
    for one in chain(error):
        if isinstance(one, (ConfigAttributeError, ConfigKeyError)):
            return unknown_key(override, one)
        if isinstance(one, ValidationError) and override:
            return wrong_value(override, str(one))
        if isinstance(one, InstantiationException) and isinstance(one.__cause__, ValueError):
            return str(one.__cause__)
        if isinstance(one, OverrideParseException):
            return unreadable(one)
        if isinstance(one, MissingConfigException) and one.options:
            group, _, name = str(one.missing_cfg_file).rpartition("/")
            return f"{group}={name!r} is unknown{nearest(name, {name: name for name in one.options})}"
    ambiguous = re.search(r"Ambiguous value for argument '(.+)'", texts[0])
    if ambiguous:
        return f"{ambiguous[1]} stands for several values: with -m they are a sweep, in brackets a list"
    added = re.search(r"An item is already at '(.+)'", texts[0])
    if added:
        return f"+{added[1]} adds a setting that is there already: leave the + out"
    return texts[0].strip().partition("\n")[0]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__


def unknown_key(override: str, error: OmegaConfBaseException) -> str:
    """The nearest settings there are: beside it, and for a name without a group those of any group."""
    full, key, beside = str(error.full_key or override.partition("=")[0]), str(error.key), error.parent_node
    path, _, _ = full.rpartition(".")
    if key == RATIO:
        return kept_of(override.partition("=")[2])
    names: dict[str, str] = {}
    if isinstance(beside, DictConfig):
        if path:
            names = {str(name): f"{path}.{name!s}" for name in beside if name != "_target_"}
        else:
            for group in beside:
                node = None if group == "hydra" or OmegaConf.is_missing(beside, str(group)) else beside._get_node(group)
                if isinstance(node, DictConfig) and not node._is_none():
                    names |= {str(name): f"{group!s}.{name!s}" for name in node if str(name) not in names}
            names |= {str(name): str(name) for name in (*beside, *GROUPS) if name != "hydra"}
    if not names:
        text = f"{override}: no {path} is chosen that has settings"
        root: Any = beside._get_root() if isinstance(beside, DictConfig) else {}
        method = root.get("method") if isinstance(root, DictConfig) else None
        if isinstance(method, DictConfig) and key in method:  # a method that is itself such a part
            return (
                f"{text}; {key} is a setting of method={method.name}: method.{override.lstrip('+').partition('.')[2]}"
            )
        return f"{text}; choose one, as in {path}=NAME {override.lstrip('+')}" if path and "." not in path else text
    of = str(getattr(error.object_type, "__name__", "")).removesuffix("Config") if path else ""
    return f"{override}: {full} is no setting{f' of {of}' * bool(of)}{nearest(key, names)}"


def nearest(name: str, valid: Mapping[str, str]) -> str:
    """The nearest of what is valid, and all that need no group before it."""
    depth = min(full.count(".") for full in valid.values())
    here = [short for short, full in valid.items() if full.count(".") == depth]
    near = difflib.get_close_matches(name, here, n=1) or difflib.get_close_matches(name, valid, n=1)
    hint = f"; did you mean {valid[near[0]]}?" if near else "."
    return f"{hint} Valid: {', '.join(valid[short] for short in here)}"


def wrong_value(override: str, text: str) -> str:
    """What kind of value is wanted."""
    key, _, value = override.partition("=")
    if key == "budget":
        return f"{override}: {BUDGET}"
    if "is not a ListConfig" in text:
        return f"{override}: a list is wanted, as in {key}=[{value}]"
    if "of type 'list'" in text:
        return f"{override}: one value is wanted, no list; to sweep over values: -m {key}={value.strip('[]')}"
    return f"{override}: {text.partition(chr(10))[0]}"


def unreadable(error: OverrideParseException) -> str:
    """An override that Hydra's grammar does not know."""
    override = str(getattr(error, "override", "") or "")
    if "=" not in override:
        return f"{override or error}: settings are given as key=value; flags are -m, --cfg job and --help"
    key, _, value = override.partition("=")
    hint = f"; {BUDGET}" if key == "budget" else f"; where it is meant so, quote it twice: \"{key}='{value}'\""
    return f"{override}: this value cannot be read{hint}"
