"""Work that waits until someone else imports a module: what it needs is not imported before."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, work: Callable[[], object]) -> None:
    """Call `work` once the module `name` has been imported; now, if it has been."""
    if name in sys.modules:
        work()
    else:
        sys.meta_path.insert(0, _Finder(name, work))


class _Finder(MetaPathFinder):
    """Finds one module as others find it, with a loader that does the work behind it."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name, self.work, self._asked = name, work, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self._asked:
            return None
        self._asked = True  # the others are asked below
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asked = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    """Loads a module with its own loader, which it keeps, and then does the finder's work."""

    def __init__(self, own: Loader, finder: _Finder) -> None:
        self.own, self.finder = own, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.finder.work()
