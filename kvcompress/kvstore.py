"""KV store, public name: `from kvcompress.kvstore import KVStore`. The code is in `kvcompress/reuse/kv_store.py`."""

from kvcompress.reuse.kv_store import FORMS, KVStore, Stats, store_of

__all__ = ["FORMS", "KVStore", "Stats", "store_of"]
