"""SessionChunks: the store of chunks that a session's prefill reuses, given by the caller or opened by the method."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from kvcompress.hook.sources import ChunkStore
from kvcompress.method.parts import Prefill


class SessionChunks:
    """Opens a store when it is first asked for, and sees to it that its chunks are those of the model as it is.

    Args:
        given: the caller's store, if there is one.

    Raises:
        ValueError: `given` holds chunks of another model.
    """

    def __init__(self, model: PreTrainedModel, prefill: Prefill, given: ChunkStore | None) -> None:
        self.model, self.prefill = model, prefill
        self._store: Any = None
        self._given = False
        if given is not None:
            self.give(given)

    @property
    def store(self) -> Any:
        """The store; None where the method's prefill reuses nothing."""
        if self._store is None:
            self._store = self.prefill.open_store(self.model)
        return self._store

    def give(self, store: ChunkStore) -> None:
        """Reuse chunks of the caller's store from here on.

        Raises:
            ValueError: it holds chunks of another model.
        """
        store.check(self.model)
        self._store, self._given = store, True

    def open_for(self, prefill: Prefill) -> None:
        """Have the store that a prompt wants which is prefilled in another way than the method does."""
        if self._store is None:
            self._store = prefill.open_store(self.model)

    def check(self) -> None:
        """See to it that the chunks are those of the model as it is now: an adapter may have been switched.

        Raises:
            ValueError: a store that was given holds others.
        """
        if self._store is None:
            return
        if self._given:
            self._store.check(self.model)
        elif not self._store.serves(self.model):
            self._store = None
