"""Tensors of pretended devices: operators on them are queued on a pretended stream.

Memory that is freed is overwritten on the stream that it was allocated on, as if that stream had
used it again, so that a missing `record_stream` shows.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only

from gradwire.rpc.codec.builtin_types import ENCODERS, tensor_node
from gradwire.testing.pretend.streams import KIND, Stream, current_stream, lock

DEVICES = 2
GARBAGE = 0x7B


class _Allocation:
    """The memory of a tensor and its views; overwritten when the last of them is gone."""

    def __init__(self, memory: Tensor, stream: Stream) -> None:
        self.stream = stream
        self.used_on: list[Stream] = []
        weakref.finalize(self, _overwrite, memory.untyped_storage(), stream, self.used_on)


def _overwrite(storage: torch.UntypedStorage, stream: Stream, used_on: list[Stream]) -> None:
    with lock:
        for other in used_on:
            if other is not stream:
                stream.wait_stream(other)
        stream._work.append(lambda: _spoil(storage))


def _spoil(storage: Any) -> None:  # noqa: ANN401
    storage.fill_(GARBAGE)


class PretendTensor(Tensor):
    """A tensor of a pretended device. `memory` is filled when its stream gets there."""

    memory: Tensor
    allocation: _Allocation

    @staticmethod
    def __new__(
        cls: type[PretendTensor], inner: Tensor, device: torch.device, _: _Allocation
    ) -> PretendTensor:
        """A tensor with the sizes of `inner`."""
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )

    def __init__(self, inner: Tensor, _: torch.device, allocation: _Allocation) -> None:
        self.memory, self.allocation = inner, allocation

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"PretendTensor({self.shape}, {self.device})"

    def record_stream(self, stream: Any) -> None:  # noqa: ANN401
        """Its memory is in use on this stream until what is queued there now is over."""
        self.allocation.used_on.append(stream)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Queue an operator on the current stream."""
        return _dispatch(func, tuple(args), kwargs or {})


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> PretendTensor:
    """A tensor whose memory holds garbage."""
    return allocated(torch.empty(tuple(shape), dtype=dtype, device="cpu"), device)


def allocated(memory: Tensor, device: torch.device) -> PretendTensor:
    """A tensor of this memory, which is spoiled first."""
    _spoil(memory.untyped_storage())
    return PretendTensor(memory, device, _Allocation(memory, current_stream(device)))


def put(tensor: Tensor, device: str | torch.device = f"{KIND}:0") -> PretendTensor:
    """A copy of a CPU tensor on a pretended device."""
    device, snapshot = torch.device(device), tensor.detach().clone()
    found = allocated(torch.empty_like(snapshot), device)
    inner = found.memory
    current_stream(device).queue(lambda: inner.copy_(snapshot))
    return found


def _inner(value: Any) -> Any:  # noqa: ANN401
    return tree_map_only(PretendTensor, lambda tensor: tensor.memory, value)


def _device_in(args: Any, kwargs: dict[str, Any]) -> torch.device | None:  # noqa: ANN401
    """The device of the result: the one asked for, or that of the first tensor with a dimension."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    ours = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PretendTensor)]
    return next((leaf.device for leaf in ours if leaf.dim()), ours[0].device if ours else None)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    device = _device_in(args, kwargs)
    if func is torch.ops.aten.record_stream.default:
        return None
    if device is None or device.type != KIND:
        return _to_host(func, args, kwargs)
    if func is torch.ops.aten.copy_.default and isinstance(args[0], PretendTensor):
        return _copied(args[0], args[1])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func.is_view:
        base: PretendTensor = args[0]
        view = func(*_inner(args), **_inner(kwargs))
        return tree_map_only(Tensor, lambda t: PretendTensor(t, device, base.allocation), view)
    return _queued(func, args, kwargs, device)


def _to_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """An operator whose result is in host memory: the current streams are waited for."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, PretendTensor):
            current_stream(leaf.device).synchronize()
    return func(*_inner(args), **_inner(kwargs))


def _copied(to: PretendTensor, source: Tensor) -> PretendTensor:
    """copy_(), also from the host, and from another device as torch does it."""
    if not isinstance(source, PretendTensor):
        snapshot, into = source.detach().clone(), to.memory
        current_stream(to.device).queue(lambda: into.copy_(snapshot))
        return to
    memory, into = source.memory, to.memory
    here, there = current_stream(source.device), current_stream(to.device)
    if here is not there:
        there.wait_stream(here)
    there.queue(lambda: into.copy_(memory))
    if here is not there:
        here.wait_stream(there)
    return to


def _queued(
    func: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> Any:  # noqa: ANN401
    inner_args, inner_kwargs = _inner(args), _inner(kwargs)
    stream = current_stream(device)
    if func._schema.name == "aten::_to_copy" and args[0].device != device:
        stream.wait_stream(current_stream(args[0].device))  # torch does so between two devices
    if func._schema.is_mutable:
        stream.queue(lambda: func(*inner_args, **inner_kwargs))
        return args[0] if args else kwargs["out"]
    try:
        on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), (inner_args, inner_kwargs))
        if "device" in kwargs:
            on_meta[1]["device"] = torch.device("meta")
        shapes = func(*on_meta[0], **on_meta[1])
    except (RuntimeError, NotImplementedError):  # its result depends on values
        stream.synchronize()
        results = func(*inner_args, **inner_kwargs)
        return tree_map_only(Tensor, lambda t: _filled(t, device), results)
    outputs = tree_map_only(Tensor, lambda t: allocated(_like(t), device), shapes)
    flat = [leaf.memory for leaf in tree_leaves(outputs) if isinstance(leaf, PretendTensor)]

    def run() -> None:
        made = tree_leaves(func(*inner_args, **inner_kwargs))
        for into, result in zip(flat, [m for m in made if isinstance(m, Tensor)], strict=True):
            into.copy_(result)

    stream.queue(run)
    return outputs


def _like(meta: Tensor) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="cpu")


def _filled(result: Tensor, device: torch.device) -> PretendTensor:
    found = allocated(torch.empty_like(result), device)
    found.memory.copy_(result)
    return found


class _Module:
    """What torch asks of the module of a device type."""

    def is_initialized(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return DEVICES

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


@cache
def install() -> None:
    """Make torch know the device type. It stays known for the life of the process."""
    backend_registration._setup_privateuseone_for_python_backend(KIND, _Module())
    ENCODERS[PretendTensor] = tensor_node
    make_library: Any = torch.library.Library
    library: Any = make_library("aten", "IMPL")
    _libraries.append(library)

    def make(shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:  # noqa: ANN401
        return empty(shape, dtype or torch.get_default_dtype(), torch.device(device))

    def make_strided(
        shape: Any,  # noqa: ANN401
        stride: Any,  # noqa: ANN401
        dtype: Any = None,  # noqa: ANN401
        device: Any = None,  # noqa: ANN401
        **_: Any,  # noqa: ANN401
    ) -> Tensor:
        kind = dtype or torch.get_default_dtype()
        memory = torch.empty_strided(shape, stride, dtype=kind, device="cpu")
        return allocated(memory, torch.device(device))

    library.impl("empty.memory_format", make, "PrivateUse1")
    library.impl("empty_strided", make_strided, "PrivateUse1")


_libraries: list[torch.library.Library] = []
