"""Handoff: a job in a thread of its own that asks the driving thread for work; exactly one of both runs."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any


class Cancelled(BaseException):
    """Ends a job's thread where the whole run has been given up."""


class Handoff:
    """A job in its thread. Exactly one side runs: the job between `resume` and its next request, or the caller."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.request: tuple[str, Any] | None = None
        self.ended = self._cancelled = False
        self._answer: tuple[bool, Any] = (True, None)
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, work), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        self._go.acquire()
        try:
            if not self._cancelled:
                self.result = work()
        except BaseException as error:
            self.error = error
        finally:
            self.request, self.ended = None, True
            self._back.release()

    def ask(self, kind: str, work: Any) -> Any:
        """From the job's thread: wait until the request is answered."""
        if self._cancelled:
            raise Cancelled
        self.request = (kind, work)
        self._back.release()
        self._go.acquire()
        if self._cancelled:
            raise Cancelled
        good, answer = self._answer
        if not good:
            raise answer
        return answer

    def answer(self, value: Any) -> None:
        self.request, self._answer = None, (True, value)

    def refuse(self, error: BaseException) -> None:
        self.request, self._answer = None, (False, error)

    def resume(self) -> None:
        """Let the job run to its next request or its end."""
        self._go.release()
        self._back.acquire()

    def cancel(self) -> None:
        """Have the job's thread end, wherever it is."""
        self._cancelled = True
        self._go.release()
        self._thread.join()
