"""Model pool: the loaded model, kept for the next cells that want the same; one at a time."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvcompress.common.memory import release
from kvcompress.data.think_rules import without_thinking
from kvcompress.models import compat, loading
from kvcompress.sweep.cell_spec import model_key


class ModelPool:
    """Owner of the one model that is loaded."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._loaded: tuple[Any, Any] | None = None

    def load(self, config: DictConfig) -> tuple[Any, Any]:
        """Model and tokenizer of a configuration; what was loaded before is freed first."""
        key = model_key(config)
        if key != self._key or self._loaded is None:
            settings: Any = OmegaConf.to_container(config.model, resolve=True)
            options, name = settings.pop("options"), settings.pop("name")
            self._loaded = self._key = None
            release()
            self._loaded = loading.load(name, config.dtype, config.device, seed=config.seed, **settings, **options)
            self._key = key
        model, tokenizer = self._loaded
        return model, _ruled(tokenizer, config)

    def tokenizer(self, config: DictConfig) -> Any:
        """The tokenizer of a configuration: the loaded model's, or on its own where that is another."""
        if self._loaded is not None and model_key(config) == self._key:
            return _ruled(self._loaded[1], config)
        wanted: Any = OmegaConf.to_container(config.model, resolve=True)
        settings = {key: wanted[key] for key in ("trust_remote_code", "revision")}
        return _ruled(loading.load_tokenizer(wanted["name"], **settings, **wanted["options"]), config)

    def positions(self, config: DictConfig) -> int | None:
        """Positions that the model of a configuration has, by its configuration alone; None where it names no limit."""
        if self._loaded is not None and model_key(config) == self._key:
            return compat.max_positions(self._loaded[0])
        wanted: Any = OmegaConf.to_container(config.model, resolve=True)
        settings = {key: wanted[key] for key in ("trust_remote_code", "revision")}
        return loading.positions(wanted["name"], **settings, **wanted["options"])


def _ruled(tokenizer: Any, config: DictConfig) -> Any:
    """The tokenizer, with thinking switched off where the configuration says so."""
    return without_thinking(tokenizer) if config.think == "off" else tokenizer
