"""Tensors that say they lie on a CUDA device and hold CPU data, and what their operations would cost or break there.

Every operation is seen by a dispatch mode: it is counted, its tensors have to be on one device, and what would make the
host wait is noted, or refused inside a step that is marked as fixed or captured. Results are those of the CPU, so that
code takes its CUDA branches and can be compared. Known to differ: speed, memory, which attention kernel SDPA takes.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

Tensor = torch.Tensor

VIEWS = frozenset(
    "view _unsafe_view slice select expand transpose t permute unsqueeze squeeze detach alias as_strided split "
    "split_with_sizes unbind unfold diagonal view_as narrow _reshape_alias lift_fresh chunk movedim".split()
)
ALLOCATIONS = frozenset("empty empty_like empty_strided new_empty new_empty_strided resize_ set_".split())
# read by the host, or shapes that depend on data: the host waits for all that is queued
WAITING = frozenset(
    "_local_scalar_dense item is_nonzero equal nonzero masked_select _unique2 unique_dim unique_consecutive bincount "
    "linalg_eigh _linalg_eigh _linalg_svd".split()
)
GATHERING = frozenset("index_select gather index embedding".split())  # read what they return
PLACING = frozenset("index_copy_ scatter_ index_fill_ copy_ fill_ zero_".split())  # write what they are given
INDEXING = frozenset("index index_put index_put_ _index_put_impl_".split())
SAME_DEVICE = frozenset(  # of which not even a number may lie elsewhere
    "cat stack index_select gather scatter scatter_ index_copy index_copy_ mm bmm addmm topk sort embedding".split()
)
INSIDE = tuple(f"{os.sep}{name}{os.sep}" for name in ("kvcompress", "methods"))


class Fault(RuntimeError):
    """What a CUDA device would refuse, or what a step does that must not."""


class MixedDevices(Fault):
    """An operation on tensors of several devices."""


class HostWaits(Fault):
    """The host waits for the device, or copies to or from it, where it must not."""


class NotCapturable(Fault):
    """An operation that a stream cannot capture."""


def where() -> str:
    """The innermost line of the library or a method that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in INSIDE) and f"{os.sep}bench{os.sep}emulated_" not in name:
            return f"{name[max(name.rfind(part) for part in INSIDE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


@dataclass
class Account:
    """What was done since `clear`.

    Attributes:
        launches: kernels, by name: every operation that is no view and no allocation.
        waits: (what, line) of every host synchronisation: reads, shapes that depend on data, copies that block.
        copies: of pinned memory that do not block.
        moved: bytes that kernels read and wrote.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: list[tuple[str, str]] = field(default_factory=list)
    copies: int = 0
    moved: int = 0

    def clear(self) -> None:
        self.launches.clear()
        self.waits.clear()
        self.copies = self.moved = 0


class Machine(Protocol):
    """What the tensors are on; see `emulated_cuda.EmulatedCUDA`."""

    account: Account

    def index(self, device: torch.device | str | int | None) -> torch.device:
        """The device with its number."""

    def waits(self, what: str) -> None:
        """The host waits here."""

    def runs(self, device: torch.device, name: str, job: Callable[[], Any], mutates: bool) -> Any:
        """A kernel is launched on the device's current stream; None where what it writes will be there later."""

    def is_pinned(self, x: Tensor) -> bool: ...

    def pin(self, x: Tensor) -> Tensor: ...


machine: Machine | None = None  # the one that is there


def the_machine() -> Machine:
    assert machine is not None, "no emulated device is there any more"
    return machine


class EmulatedTensor(torch.Tensor):
    """A tensor on an emulated device; `held` is its data, a CPU tensor.

    Python is told that it lies on CUDA. In C++ it is one on the CPU: a build without CUDA has no guard for devices.
    """

    held: Tensor
    on: torch.device

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> EmulatedTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype
        )
        made.held, made.on = held, device
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # a mode sees them first

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return dispatched(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.on

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return self.on.index or 0

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As torch's, whose own would see no other device here."""
        kwargs = {**kwargs, **_named(args)}
        device = kwargs.pop("device", None)
        target = self.on if device is None else the_machine().index(device)
        dtype = kwargs.pop("dtype", None) or self.dtype
        if target == self.on and dtype == self.dtype and not kwargs.get("copy"):
            return self
        non_blocking = bool(kwargs.get("non_blocking"))
        return torch.ops.aten._to_copy.default(self, dtype=dtype, device=target, non_blocking=non_blocking)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Tensor:
        return self.to(the_machine().index(device), non_blocking=non_blocking)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_placed(index, self.device))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_placed(index, self.device), value)

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        """Nothing: memory is not reused here."""

    def __deepcopy__(self, memo: Any) -> EmulatedTensor:
        return EmulatedTensor(self.held.clone(), self.device)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EmulatedTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


def _named(args: tuple) -> dict[str, Any]:
    """The arguments of `Tensor.to` by name."""
    found: dict[str, Any] = {}
    for arg in args:
        if isinstance(arg, Tensor):
            found |= {"device": arg.device, "dtype": arg.dtype}
        elif isinstance(arg, torch.dtype):
            found["dtype"] = arg
        elif isinstance(arg, bool):
            found["copy" if "non_blocking" in found else "non_blocking"] = arg
        elif arg is not None:
            found["device"] = arg
    return found


def _placed(index: Any, device: torch.device) -> Any:
    """An index whose lists are tensors on the device, as torch makes of them, with a copy that blocks."""
    if isinstance(index, tuple):
        return tuple(_placed(one, device) for one in index)
    return torch.tensor(index).to(device) if isinstance(index, list) else index


class Operations(TorchDispatchMode):
    """Sees every operation, also those that make tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return dispatched(func, args, kwargs or {})


def dispatched(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run one operation of torch's on the data, as its devices would have it."""
    on, name = the_machine(), func._schema.name.split("::")[-1]
    leaves = tree_leaves((args, kwargs))
    ours = [x for x in leaves if isinstance(x, EmulatedTensor)]
    hosts = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, EmulatedTensor)]
    target = None if kwargs.get("device") is None else on.index(kwargs["device"])
    to_device = target is not None and target.type == "cuda"
    if not ours and not to_device:
        pinned = kwargs.get("pin_memory")
        made = func(*args, **{**kwargs, "pin_memory": False} if pinned else kwargs)
        return on.pin(made) if pinned else made
    if name in ("_to_copy", "copy_") and _between(name, args, target):
        return _copied(on, func, name, args, kwargs, target)
    _check_devices(name, args, ours, hosts)
    _check_waits(on, name, args, kwargs, hosts)
    device = target if target is not None and to_device else ours[0].device
    return _run(on, func, name, args, kwargs, device)


def _between(name: str, args: tuple, target: Any) -> bool:
    """True for a copy between host and device."""
    source = args[1] if name == "copy_" else args[0]
    there = isinstance(args[0], EmulatedTensor) if name == "copy_" else None
    if there is None:
        there = isinstance(source, EmulatedTensor) if target is None else torch.device(target).type == "cuda"
    return isinstance(source, Tensor) and isinstance(source, EmulatedTensor) != there


def _copied(on: Machine, func: Any, name: str, args: tuple, kwargs: dict[str, Any], target: Any) -> Any:
    source = args[1] if name == "copy_" else args[0]
    up = not isinstance(source, EmulatedTensor)
    blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if source.numel() == 0:
        pass
    elif up and not blocking and on.is_pinned(source):
        on.account.copies += 1
    else:
        kind = "copy to the device" if up else "copy to the host"
        on.waits(f"{kind}, {tuple(source.shape)} {str(source.dtype).removeprefix('torch.')}")
    if name == "copy_":
        into, data = args[0], _data(source)
        if not up:
            into.copy_(data)
            return into
        on.runs(into.device, "copy_", lambda: into.held.copy_(data), True)
        return into
    plain = {key: _data(value) for key, value in kwargs.items() if key != "non_blocking"}
    made = func(_data(source), **plain)
    made = made.clone() if made is _data(source) else made
    return EmulatedTensor(made, target) if up else made


def _check_devices(name: str, args: tuple, ours: list[EmulatedTensor], hosts: list[Tensor]) -> None:
    devices = {x.device for x in ours}
    if len(devices) > 1 and name not in ("copy_", "_to_copy"):
        raise MixedDevices(f"{name} of tensors on {', '.join(sorted(map(str, devices)))} at {where()}")
    if name in INDEXING:
        if ours and not isinstance(args[0], EmulatedTensor):
            raise MixedDevices(f"{name}: a CPU tensor indexed by or set from one on {ours[0].device} at {where()}")
        if (
            name != "index"
            and isinstance(args[2], Tensor)
            and not isinstance(args[2], EmulatedTensor)
            and args[2].dim()
        ):
            raise MixedDevices(f"{name}: values on the CPU for a tensor on {args[0].device} at {where()}")
        return
    wrong = [x for x in hosts if x.dim() or name in SAME_DEVICE]
    if ours and wrong:
        raise MixedDevices(f"{name} of a CPU tensor {tuple(wrong[0].shape)} and one on {ours[0].device} at {where()}")


def _check_waits(on: Machine, name: str, args: tuple, kwargs: dict[str, Any], hosts: list[Tensor]) -> None:
    if name in WAITING:
        on.waits(name)
    elif (
        name == "repeat_interleave"
        and kwargs.get("output_size") is None
        and any(isinstance(a, Tensor) for a in args[-1:])
    ):
        on.waits("repeat_interleave of unknown length")
    elif name in INDEXING:
        given = [i for i in args[1] if i is not None]
        for index in given:
            if not isinstance(index, EmulatedTensor):
                on.waits(f"{name} by an index on the CPU, {tuple(index.shape)}")
        masks = [i for i in given if i.dtype in (torch.bool, torch.uint8)]
        filled = name != "index" and len(given) == 1 and isinstance(args[2], Tensor) and args[2].numel() == 1
        if masks and not filled:
            on.waits(f"{name} by a mask")


def _data(x: Any) -> Any:
    if isinstance(x, EmulatedTensor):
        return x.held
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x


def _run(on: Machine, func: Any, name: str, args: tuple, kwargs: dict[str, Any], device: torch.device) -> Any:
    plain_args, plain = tree_map(_data, args), tree_map(_data, kwargs)
    plain.pop("pin_memory", None)
    written = [
        given
        for given, said in zip(args, func._schema.arguments, strict=False)
        if said.alias_info is not None and said.alias_info.is_write
    ]
    job: Callable[[], Any] = lambda: func(*plain_args, **plain)  # noqa: E731
    if name in VIEWS or name in ALLOCATIONS:
        found = job()
    else:
        found = on.runs(device, name, job, bool(written))
        on.account.moved += traffic(name, tree_leaves((plain_args, plain)), tree_leaves(found))
    if found is None and written:
        return written[0]
    same = {id(x.held): x for x in tree_leaves((args, kwargs)) if isinstance(x, EmulatedTensor)}

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return same[id(x)] if id(x) in same else EmulatedTensor(x, device)

    return tree_map(wrapped, found)


def traffic(name: str, read: list[Any], written: list[Any]) -> int:
    """Bytes that a kernel reads and writes: each number of its tensors once, of an expanded one what it holds."""

    def size(x: Tensor) -> int:
        return min(x.untyped_storage().nbytes(), x.numel() * x.element_size())

    inputs = [x for x in read if isinstance(x, Tensor)]
    outputs = [x for x in written if isinstance(x, Tensor)]
    if name in PLACING:
        return 2 * sum(size(x) for x in inputs[1:][-1:]) or sum(size(x) for x in outputs)
    return sum(size(x) for x in (outputs if name in GATHERING else inputs)) + sum(size(x) for x in outputs)


@contextmanager
def on_data() -> Iterator[None]:
    """Work on plain CPU tensors, unseen."""
    with _disable_current_modes():
        yield
