"""lm-eval's tasks by name, from its index or a folder of one's own, loaded with their documents."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvcompress.common.hashing import digest

SEED = 1234  # of lm-eval's choice of examples; ours is added to it


@dataclass(frozen=True)
class Loaded:
    """Tasks of lm-eval with their documents. `facts` is what prompts and metrics depend on."""

    tasks: Mapping[str, Any]
    groups: Mapping[str, Any]
    docs: Mapping[str, Sequence[Any]]
    facts: Mapping[str, Any]


@contextmanager
def seeded() -> Iterator[None]:
    """Python's and numpy's generators as lm-eval seeds them before it loads a task; afterwards as they were."""
    import numpy

    ours, theirs = random.getstate(), numpy.random.get_state()
    random.seed(0)
    numpy.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(ours)
        numpy.random.set_state(theirs)


@lru_cache(maxsize=4)
def manager(include_path: str | None, published: bool = True) -> Any:
    """lm-eval's index of tasks, with those in a folder of one's own."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=published)


def index_of(names: Sequence[str], include_path: str | None) -> Any:
    """The index that has these names: of one's own tasks alone where that is enough, for lm-eval's has 14,000."""
    if include_path is not None:
        own = manager(include_path, published=False)
        kinds = [{own.task_index[found].kind.name for found in own.match_tasks([name])} for name in names]
        if all(kinds) and set.union(*kinds) <= {"TASK", "PY_TASK"}:  # groups may name published ones
            return own
    return manager(include_path)


def chosen(index: Any, names: Sequence[str]) -> list[str]:
    """Names, patterns (`mmlu_*`) and yaml files as what lm-eval loads.

    Raises:
        ValueError: an unknown name, with those near it.
    """
    found: list[str] = []
    for name in names:
        matching = index.match_tasks([name]) or ([name] if Path(name).is_file() else [])
        if not matching:
            known = index.all_tasks
            near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
            near += [other for other in known if name and other.startswith(name) and other not in near][:5]
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ValueError(
                f"lm-eval has no task {name!r} among its {len(known)}{hint}. `lm-eval ls tasks` lists them; yaml files of "
                "your own: task.include_path=FOLDER"
            )
        found += matching
    return list(dict.fromkeys(found))


@lru_cache(maxsize=8)
def load(names: tuple[str, ...], include_path: str | None, num_fewshot: int | None, unsafe_code: bool) -> Loaded:
    """Tasks with their data, which comes from the files they name, the Hub's cache or the Hub.

    Raises:
        ValueError: an unknown task, one whose data is not to be had or that cannot be run here.
    """
    import lm_eval

    index = index_of(names, include_path)
    wanted = chosen(index, names)
    try:
        with seeded():
            found = index.load(wanted)
            docs = {name: task.eval_docs for name, task in found["tasks"].items()}
    except Exception as error:  # whatever datasets and the Hub's client raise, or a task's own code
        raise ValueError(f"{_looked(index, wanted)} cannot be loaded ({type(error).__name__}: {error})") from error
    facts: dict[str, Any] = {"lm_eval": lm_eval.__version__}
    for name, task in found["tasks"].items():
        if getattr(task, "MULTIMODAL", False):
            raise ValueError(f"lm-eval's task {name} has images or sound; only text can be asked here")
        if getattr(task, "UNSAFE_CODE", False) and not unsafe_code:
            raise ValueError(f"lm-eval's task {name} runs code that the model writes: task.unsafe_code=true allows it")
        default = task.get_config("num_fewshot")
        if default is None or (num_fewshot is not None and default != 0):  # 0 in a task's yaml stands, as in lm-eval
            task.set_config("num_fewshot", num_fewshot or 0)
        plain = {key: value for key, value in task.dump_config().items() if key not in ("dataset_kwargs", "metadata")}
        texts = [json.dumps(doc, sort_keys=True, default=str) for doc in docs[name]]
        if not texts:
            raise ValueError(f"lm-eval's task {name} has no document")
        facts[name] = {"config": digest(plain), "data": digest(texts), "documents": len(texts)}
    return Loaded(found["tasks"], found.get("groups", {}), docs, facts)


def _looked(index: Any, names: Sequence[str]) -> str:
    """The tasks, and where the data of their yaml files would come from."""
    from datasets import config
    from lm_eval.tasks._yaml_loader import load_yaml

    places = set()
    for name in names:
        entry = index.task_index.get(name)
        try:
            plain = load_yaml(entry.yaml_path if entry else Path(name), resolve_func=False, recursive=True)
        except Exception:  # the error that is being told matters more
            continue
        files = (plain.get("dataset_kwargs") or {}).get("data_files")
        if plain.get("dataset_path"):
            places.add(
                json.dumps(files)
                if files
                else f"the Hub's {plain['dataset_path']} (cached in {config.HF_DATASETS_CACHE})"
            )
    return f"lm-eval's {', '.join(names)}: looked for {' and '.join(sorted(places)) or 'its data'}; it"
