"""CUDA devices emulated on a CPU: current device, streams, events, graphs and Triton launches around `emulated_tensor`.

    with EmulatedCUDA(devices=2) as cuda:
        cuda.place(model, "cuda:1")
        ...  # runs as on two GPUs; cuda.account says what it launched and where the host waited

Work on a side stream is done as late as a device might: when something waits for it. Triton's kernels run in its
interpreter (`TRITON_INTERPRET=1` before Triton is imported), or are only counted. No GPU and no compiler is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any, Literal, Self
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kvcompress.bench import emulated_tensor
from kvcompress.bench.emulated_tensor import (
    Account,
    EmulatedTensor,
    HostWaits,
    MixedDevices,
    NotCapturable,
    Operations,
    on_data,
    where,
)

Tensor = torch.Tensor

H100 = 232_448  # bytes of shared memory of a block
KERNELS: dict[str, dict[str, tuple[int, ...]]] = {  # of Triton, by module, and which argument each one fills
    "triton_kernels": {"partial_sums": (7, 8, 9), "packed_sums": (7, 8, 9), "merge": (3,)},
    "mass_kernels": {"row_logsumexp": (4,), "column_sums": (6,)},
}


class Stream:
    """A queue of a device's work; of a side stream it is done when something waits for it."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device, self.queue = cuda().index(device), list[Callable[[], Any]]()

    def finish(self, number: int | None = None) -> None:
        """Do what is queued, or the first `number` jobs of it."""
        number = len(self.queue) if number is None else number
        due, self.queue = self.queue[:number], self.queue[number:]
        with on_data():
            for job in due:
                job()

    def wait_stream(self, other: Stream) -> None:
        other.finish()

    def wait_event(self, event: Event) -> None:
        event.finish()

    def synchronize(self) -> None:
        cuda().waits("a stream is synchronised")
        self.finish()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A place in a stream; its time is what its device had launched by then, in milliseconds for kernels."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._stream: Stream | None = None
        self._place, self._time = 0, 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = cuda().current_stream() if stream is None else stream
        self._place, self._time = len(self._stream.queue), cuda().launched[self._stream.device]

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.finish(min(self._place, len(self._stream.queue)))
            self._place = 0

    def wait(self, stream: Stream | None = None) -> None:
        self.finish()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        cuda().waits("an event is synchronised")
        self.finish()

    def elapsed_time(self, other: Event) -> float:
        return float(other._time - self._time)


class Graph:
    """What was launched on one device while it was captured; `replay` does it again, on the same memory."""

    def __init__(self, **_: Any) -> None:
        self.jobs: list[tuple[Callable[[], Any], Any, bool]] = []
        self.device: torch.device | None = None

    def replay(self) -> None:
        cuda().account.launches["graph"] += 1
        with on_data():
            for job, before, mutates in self.jobs:
                found = job()
                if mutates:
                    continue
                for old, new in zip(tree_leaves(before), tree_leaves(found), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class TritonLaunch:
    """Stands in for a kernel: launched, its pointers have to be of the current device."""

    def __init__(self, kernel: Any, name: str, filled: tuple[int, ...], interpret: bool):
        self.kernel, self.name, self.filled, self.interpret = kernel, name, filled, interpret

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **sizes: Any) -> None:
            on = cuda()
            here, tensors = on.index(None), [x for x in args if isinstance(x, Tensor)]
            for number, x in enumerate(tensors):
                if x.device != here:  # the words are Triton's
                    raise ValueError(
                        f"Pointer argument (at {number}) cannot be accessed from Triton (cpu tensor?): {self.name} is "
                        f"launched on {here}, its tensor lies on {x.device} at {where()}"
                    )
            data = [x.held if isinstance(x, EmulatedTensor) else x for x in args]

            def job() -> None:
                if self.interpret:
                    self.kernel[grid](*data, **({**sizes, "UPCAST": True} if "UPCAST" in sizes else sizes))
                else:
                    for at in self.filled:
                        data[at].zero_()

            on.runs(here, self.name, job, True)
            on.account.moved += sum(x.numel() * x.element_size() for x in tensors)

        return launch


class _Functions(TorchFunctionMode):
    """Sees what Python calls of torch: what would be done in C++ behind the dispatcher's back."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, on = kwargs or {}, cuda()
        if func is F.scaled_dot_product_attention and isinstance(args[0], EmulatedTensor):
            return on.attention(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor) and "cuda" in str(kwargs.get("device")):
            if func is torch.as_tensor and isinstance(args[0], Tensor):
                return args[0].to(kwargs["device"], kwargs.get("dtype") or args[0].dtype)
            made = torch.tensor(args[0], dtype=kwargs.get("dtype"))
            return made.to(kwargs["device"])
        if func is Tensor.pin_memory:
            if isinstance(args[0], EmulatedTensor):
                raise RuntimeError("cannot pin a tensor on a device: only dense CPU tensors can be pinned")
            return on.pin(args[0].clone())
        if func is Tensor.is_pinned:
            return on.is_pinned(args[0])
        if func in (Tensor.to, Tensor.cuda) and not isinstance(args[0], EmulatedTensor):
            given = emulated_tensor._named(args[1:]) | kwargs
            device = given.pop("device", "cuda" if func is Tensor.cuda else None)
            return func(args[0], **given) if device is None else Tensor.to(args[0], on.index(device), **given)
        if "cuda" in str(kwargs.get("device")):
            kwargs = {**kwargs, "device": on.index(kwargs["device"])}  # no guard could say which is current
        return func(*args, **kwargs)


class EmulatedCUDA:
    """CUDA devices that are there inside a `with`.

    Attributes:
        account: what was launched, and where the host waited.
        launched: kernels by device.
        capturing: the graph that is being captured.
    """

    def __init__(
        self, devices: int = 1, triton: Literal["interpret", "count"] = "interpret", shared_memory: int = H100
    ) -> None:
        """Args:
        devices: how many there are.
        triton: run Triton's kernels in its interpreter, or only count them: what they give is zeros then.
        shared_memory: bytes that a block may take.
        """
        self.account = Account()
        self.devices, self.triton, self.shared_memory = devices, triton, shared_memory
        self.current = 0
        self.launched = {torch.device("cuda", i): 0 for i in range(devices)}
        self.capturing: Graph | None = None
        self._fixed = False
        self._pinned: dict[int, torch.UntypedStorage] = {}  # by address: what is held is not given to another
        self._defaults: dict[torch.device, Stream] = {}
        self._streams: dict[torch.device, Stream] = {}
        self._stack = ExitStack()

    # ------------------------------------------------------------------ what tensors ask

    def index(self, device: Any) -> torch.device:
        if device is None:
            return torch.device("cuda", self.current)
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if found.type != "cuda":
            return found
        number = self.current if found.index is None else found.index
        if number >= self.devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {number} of {self.devices}")
        return torch.device("cuda", number)

    def waits(self, what: str) -> None:
        if self.capturing is not None:
            raise NotCapturable(f"operation not permitted when stream is capturing: {what} at {where()}")
        if self._fixed:
            raise HostWaits(f"the host waits inside a step with fixed shapes: {what} at {where()}")
        self.account.waits.append((what, where()))

    def runs(self, device: torch.device, name: str, job: Callable[[], Any], mutates: bool) -> Any:
        self.account.launches[name] += 1
        self.launched[device] += 1
        stream = self.current_stream(device)
        if self.capturing is not None:
            if device != self.capturing.device:
                raise NotCapturable(f"{name} runs on {device}, the capture is on {self.capturing.device}: at {where()}")
            with on_data():
                found = job()
            self.capturing.jobs.append((job, found, mutates))
            return found
        if stream is not self._defaults[device]:
            if mutates:
                stream.queue.append(job)  # what it writes into is there already
                return None
            stream.finish()
        with on_data():
            return job()

    def is_pinned(self, x: Tensor) -> bool:
        return not isinstance(x, EmulatedTensor) and x.untyped_storage().data_ptr() in self._pinned

    def pin(self, x: Tensor) -> Tensor:
        self._pinned[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: Any, **options: Any
    ) -> Tensor:
        """SDPA: one kernel, and two that make a bias of a mask."""
        given = [x for x in (q, k, v, attn_mask) if x is not None]
        if any(x.device != q.device for x in given):
            raise MixedDevices(
                f"attention over tensors on {', '.join(sorted({str(x.device) for x in given}))} at {where()}"
            )
        data = [x.held if isinstance(x, EmulatedTensor) else x for x in (q, k, v, attn_mask)]
        job = lambda: F.scaled_dot_product_attention(*data, *args, **options)  # type: ignore[arg-type]  # noqa: E731
        found = self.runs(q.device, "sdpa", job, False)
        if attn_mask is not None:
            self.account.launches["sdpa mask"] += 2
            self.account.moved += 3 * q.element_size() * attn_mask.numel()
        self.account.moved += sum(x.numel() * x.element_size() for x in (q, k, v, found))
        return EmulatedTensor(found, q.device)

    # ------------------------------------------------------------------ what tests and tables ask

    def place(self, module: Any, device: str = "cuda:0") -> Any:
        """Put a module's parameters and buffers on a device."""
        where_to = self.index(device)
        for part in module.modules():
            for name, held in list(part._parameters.items()):
                if held is not None:
                    made = EmulatedTensor(held.data, where_to)
                    part._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
            for name, buffer in list(part._buffers.items()):
                if buffer is not None:
                    part._buffers[name] = EmulatedTensor(buffer, where_to)
            for name, value in list(vars(part).items()):
                if isinstance(value, Tensor) and not isinstance(value, EmulatedTensor):
                    setattr(part, name, EmulatedTensor(value, where_to))
        return module

    def put(self, x: Tensor, device: str = "cuda:0") -> EmulatedTensor:
        """A tensor on a device, unseen by the account."""
        return EmulatedTensor(x, self.index(device))

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Inside, the host may neither wait nor copy: `HostWaits` is raised where it does."""
        before, self._fixed = self._fixed, True
        try:
            yield
        finally:
            self._fixed = before

    # ------------------------------------------------------------------ torch.cuda

    def current_stream(self, device: Any = None) -> Stream:
        return self._streams[self.index(device)]

    def set_stream(self, stream: Stream) -> None:
        self._streams[stream.device], self.current = stream, stream.device.index

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        device, before = self.current, self._streams[stream.device]
        self.set_stream(stream)
        try:
            yield
        finally:
            self._streams[stream.device], self.current = before, device

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self.index(device).index
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Graph, **_: Any) -> Iterator[None]:
        """As torch 2.13's: where the capture fails the stream of the capture stays current."""
        graph.device = self.index(None)
        before = self.current_stream()
        self.set_stream(Stream())
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None
        self.set_stream(before)

    def synchronize(self, device: Any = None) -> None:
        if self.capturing is not None or self._fixed:
            self.waits("the device is synchronised")
        self.current_stream(device).finish()

    def _properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="emulated", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132, uuid="emulated",
            shared_memory_per_block_optin=self.shared_memory,
        )  # fmt: skip

    def __enter__(self) -> Self:
        if emulated_tensor.machine is not None:
            raise RuntimeError("CUDA devices are emulated already")
        emulated_tensor.machine = self
        self._stack.callback(setattr, emulated_tensor, "machine", None)
        for i in range(self.devices):
            device = torch.device("cuda", i)
            self._defaults[device] = self._streams[device] = Stream(device)
        known: dict[str, Any] = {
            "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: self.devices,
            "current_device": lambda: self.current, "set_device": lambda d: setattr(self, "current", self.index(d).index),
            "device": self.device, "stream": self.stream, "set_stream": self.set_stream, "graph": self.graph,
            "current_stream": self.current_stream, "default_stream": lambda d=None: self._defaults[self.index(d)],
            "synchronize": self.synchronize, "Stream": Stream, "Event": Event, "CUDAGraph": Graph,
            "get_device_properties": self._properties, "get_device_name": lambda d=None: "emulated",
            "get_device_capability": lambda d=None: (9, 0), "empty_cache": lambda: None,
            "mem_get_info": lambda d=None: (80 << 30, 80 << 30), "reset_peak_memory_stats": lambda d=None: None,
            **{name: lambda d=None: 0 for name in ("memory_allocated", "memory_reserved", "max_memory_allocated",
                                                   "max_memory_reserved")},
        }  # fmt: skip
        for name, value in known.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # a module that moves takes new parameters: its old ones cannot hold the data of an emulated tensor
        future = torch.__future__
        self._stack.callback(
            future.set_overwrite_module_params_on_conversion, future.get_overwrite_module_params_on_conversion()
        )
        future.set_overwrite_module_params_on_conversion(True)
        self._replace_kernels()
        self._stack.enter_context(_Functions())
        self._stack.enter_context(Operations())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _replace_kernels(self) -> None:
        from kvcompress.kernels import launch

        launch.shared_memory.cache_clear()
        self._stack.callback(launch.shared_memory.cache_clear)
        self._stack.enter_context(mock.patch.object(launch, "_refused", {}))
        if not launch._installed():
            return
        from kvcompress.kernels import mass_kernels, triton_kernels  # noqa: F401

        for module, kernels in KERNELS.items():
            found = sys.modules[f"kvcompress.kernels.{module}"]
            for name, filled in kernels.items():
                made = TritonLaunch(getattr(found, name), name, filled, self.triton == "interpret")
                self._stack.enter_context(mock.patch.object(found, name, made))


def cuda() -> EmulatedCUDA:
    """The emulated devices that are there."""
    found = emulated_tensor.the_machine()
    assert isinstance(found, EmulatedCUDA)
    return found
