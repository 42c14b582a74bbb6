"""Encoding of tensors as headers and raw buffers, and decoding, with as few copies as possible.

Encoding returns views of the tensors' memory. It copies in three cases: another device, memory with
gaps or overlaps, and a tensor with a conjugate, negative or zero-tensor bit, which has no such
bytes in memory. The bytes of a tensor on another device may lie in a block of device memory instead
of the payload; how, is decided above (agent/devices).

Decoding copies nothing: every tensor uses the memory of the received block and keeps it alive. Each
has its own storage over its own bytes, so no tensor is a view of another, and `deepcopy` and
`torch.save` copy only its bytes. Every number in a header from a peer is checked before torch sees
it. Torch does not resize memory that it shares with a buffer: neither a tensor that was sent nor
one that was received can grow with `resize_`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.errors import BadMessage, NotSerializable, OverLimit
from gradwire.options import Limits
from gradwire.wire.message import ALIGNMENT, Buffer, raise_limit

REQUIRES_GRAD = 1
INFERENCE = 2
COALESCED = 4
_ALL_FLAGS = REQUIRES_GRAD | INFERENCE | COALESCED

_MAX_DIMS = 64
_MAX_BYTES = (1 << 63) - 1
META = "meta"
_LIMITS = Limits()
_PADDING = tuple(bytes(n) for n in range(ALIGNMENT))

# The codes of dtypes and layouts are part of the wire: add at the end, never reuse.
_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)
# An older torch lacks the last few, and refuses a received tensor of such a dtype.
DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
_INDEX_TYPES = (torch.int64, torch.int32)
_NAMES_WITHOUT_NUMPY = ("torch.bfloat16", "torch.complex32", "torch.float8", "torch.float4")
_WITHOUT_NUMPY = {dtype for dtype in DTYPE_CODES if str(dtype).startswith(_NAMES_WITHOUT_NUMPY)}
_PLAIN_CODES = {dtype: code for dtype, code in DTYPE_CODES.items() if dtype not in _WITHOUT_NUMPY}
_PLAIN_TYPES = (Tensor, Parameter)

_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}
_STRIDED = 0
LAYOUTS: dict[int, torch.layout] = dict(enumerate((torch.strided, *_PARTS)))
LAYOUT_CODES = {layout: code for code, layout in LAYOUTS.items()}


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The metadata of one tensor.

    `order` lists the dimensions from the outermost in memory to the innermost; None is row-major.
    `device` is where the tensor arrives, "" for the cpu. A sparse tensor has no bytes itself but
    `parts`: the dense tensors it consists of, in the order of the arguments of torch's constructor.
    `block` is the number of a block of device memory and the offset of the bytes in it, if they are
    not in the payload.
    """

    dtype: int
    shape: tuple[int, ...]
    offset: int = 0
    flags: int = 0
    order: tuple[int, ...] | None = None
    layout: int = _STRIDED
    device: str = ""
    parts: tuple[TensorHeader, ...] = ()
    block: tuple[int, int] | None = None


class Layout(NamedTuple):
    """How a tensor lies in memory, which it fills."""

    shape: tuple[int, ...]
    strides: Sequence[int]
    dtype: torch.dtype
    nbytes: int


class OpenLease(Protocol):
    """A block of device memory that is filled with the tensors of a message."""

    def append(self, tensor: Tensor) -> tuple[int, int]:
        """Copy a contiguous tensor into it; returns `TensorHeader.block`."""


class Placement(NamedTuple):
    """Where a tensor arrives, and the block that carries it there, if one does."""

    device: str
    lease: OpenLease | None = None
    is_plain: bool = False
    """whether its class is known to be a plain tensor in host memory"""


ON_CPU = Placement("")


class Arriving(Protocol):
    """The devices on which the tensors of a message arrive."""

    def take(self, header: TensorHeader, layout: Layout) -> Tensor:
        """A tensor with the bytes that lie in `header.block`, on the header's device."""

    def place(self, tensor: Tensor, device: str) -> Tensor:
        """A copy on that device of a tensor that arrived in host memory."""


def without_inference(header: TensorHeader) -> TensorHeader:
    """The header of the same tensor as a normal, not an inference tensor."""
    if not header.flags & INFERENCE:
        return header
    return msgspec.structs.replace(header, flags=header.flags & ~INFERENCE)


_is_cpu, _device_of = attrgetter("is_cpu"), attrgetter("device")


def are_on_cpu(tensors: Sequence[Tensor]) -> bool:
    """Whether they can be encoded without placements. hot: every message with tensors"""
    return all(map(_is_cpu, tensors))


def arrive_on_cpu(headers: Sequence[TensorHeader]) -> bool:
    """Whether they can be decoded without devices. hot: every message with tensors"""
    return not any(map(_device_of, headers))


def encode_tensors(
    tensors: Sequence[Tensor],
    limits: Limits = _LIMITS,
    placements: Sequence[Placement] | None = None,
) -> tuple[list[TensorHeader], list[Buffer]]:
    """Encode tensors as headers, and buffers whose concatenation is the payload.

    Tensors without placements must be on the CPU. The buffers are views: a write to a tensor before
    the send is over changes what is sent.

    hot: every message with tensors
    """
    if len(tensors) > limits.tensors:
        raise NotSerializable(
            f"{len(tensors)} tensors in one message are over the limit of {limits.tensors}",
            hint="stack them, send them in several calls, or raise Limits(tensors=…) on both ends",
        )
    payload = _Payload()
    headers: list[TensorHeader] = []
    try:
        for n, tensor in enumerate(tensors):
            if placements is None and (header := _maybe_encode_plain(tensor, payload)) is not None:
                headers.append(header)
            else:
                place = ON_CPU if placements is None else placements[n]
                headers.append(_encode(tensor, payload, place))
    except NotSerializable as refusal:
        raise refusal.inside(f"tensors[{len(headers)}]") from None
    return headers, payload.buffers


def decode_tensors(
    headers: Sequence[TensorHeader],
    payload: memoryview | None,
    limits: Limits = _LIMITS,
    arriving: Arriving | None = None,
) -> list[Tensor]:
    """Decode tensors in place: each keeps the `payload` object alive.

    Without `arriving`, all must arrive on the CPU.

    `payload` must be writable, must not be released by hand, and only the tensors may write to it.

    hot: every message with tensors
    """
    if len(headers) > limits.tensors:
        why = f"{len(headers)} tensors are over the limit of {limits.tensors}"
        raise OverLimit(why, hint=raise_limit("tensors"))
    if limits.dimensions < _MAX_DIMS and any(len(h.shape) > limits.dimensions for h in headers):
        why = f"a tensor has more than {limits.dimensions} dimensions, the limit"
        raise OverLimit(why, hint=raise_limit("dimensions"))
    block, inference = _Block(payload), torch.is_inference_mode_enabled()
    tensors: list[Tensor] = []
    for header in headers:
        flags = header.flags
        if flags & ~_ALL_FLAGS:
            raise _malformed(f"flags {flags:#x} are unknown")
        # This thread may be inside inference_mode; what counts is the mode of the sender.
        if inference is not bool(flags & INFERENCE):
            with torch.inference_mode(not inference):
                tensors.append(_rebuild(header, block, arriving))
        elif header.device or header.layout or header.order is not None:
            tensors.append(_rebuild(header, block, arriving))
        else:  # most tensors, without a function more
            tensors.append(_rebuild_dense(header, block, arriving))
    return tensors


class _Payload:
    """The buffers of a payload being encoded, each tensor at a multiple of ALIGNMENT."""

    __slots__ = ("_end", "buffers")

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._end = 0

    def append(self, tensor: Tensor) -> int:
        """Add the bytes of a contiguous tensor, as a view if possible; returns their offset."""
        try:
            if tensor.dtype in _WITHOUT_NUMPY:
                tensor = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
            view = tensor.numpy(force=True).data.cast("B")
        except RuntimeError as error:
            raise _refusal("a tensor without its own memory", f"torch says: {error}") from error
        offset = self._end
        if gap := -offset % ALIGNMENT:
            self.buffers.append(_PADDING[gap])
            offset += gap
        self.buffers.append(view)
        self._end = offset + len(view)
        return offset


def _maybe_encode_plain(tensor: Tensor, payload: _Payload) -> TensorHeader | None:
    """What `_encode` returns for most tensors, in fewer steps; None for the others.

    hot: every message with tensors
    """
    code = _PLAIN_CODES.get(tensor.dtype)
    if code is None or type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided:
        return None
    if not tensor.is_cpu or tensor.is_nested:
        return None
    shape = tuple(tensor.shape)
    if 0 in shape or (1 in shape and len(shape) > 1):
        return None
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if tensor.is_inference():
        flags |= INFERENCE
    if not tensor.is_contiguous():
        if any(tensor.stride()) or flags:
            return None
        tensor = tensor.contiguous()  # one value for all, as the gradient of a sum is
    return TensorHeader(code, shape, payload.append(tensor), flags)


def _encode(tensor: Tensor, payload: _Payload, place: Placement) -> TensorHeader:
    if place.lease is None and not place.is_plain:
        _check_plain(tensor)
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if tensor.is_inference():
        flags |= INFERENCE
    device, is_strided = place.device, tensor.layout is torch.strided
    if not tensor.is_cpu:
        device, tensor = META if tensor.is_meta else device, tensor.detach()
        if is_strided and place.lease is None and device != META:
            tensor = _in_host_memory(tensor)
    if not is_strided:
        return _encode_sparse(tensor.detach(), payload, flags, device)
    return _encode_dense(tensor, payload, flags, device, place.lease)


def _check_plain(tensor: Tensor) -> None:
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise _refusal(f"a tensor of type {name}", "send a plain torch.Tensor made of it")


def _in_host_memory(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, which a device fills several times faster than other memory."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copy.copy_(tensor)  # waits for the device


def _encode_dense(
    tensor: Tensor,
    payload: _Payload,
    flags: int = 0,
    device: str = "",
    lease: OpenLease | None = None,
) -> TensorHeader:
    dtype = tensor.dtype
    code = DTYPE_CODES.get(dtype)
    if code is None:
        raise _refusal(
            f"a tensor of dtype {dtype}", "dequantize() it, or view() it as another dtype"
        )
    if tensor.is_nested:
        raise _refusal("a nested tensor", "send its unbind(), or to_padded_tensor()")
    shape = tuple(tensor.shape)
    order = None
    # A contiguous tensor may have any stride in dimensions of size 1.
    if not tensor.is_contiguous() or (1 in shape and len(shape) > 1):
        tensor, order = _in_memory_order(tensor.detach(), shape)
    if lease is not None:
        block = lease.append(tensor.resolve_conj().resolve_neg())
        return TensorHeader(code, shape, 0, flags, order, _STRIDED, device, (), block)
    offset = 0
    if device != META and 0 not in shape:
        offset = payload.append(tensor)
    return TensorHeader(code, shape, offset, flags, order, _STRIDED, device)


def _in_memory_order(
    tensor: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...] | None]:
    """The tensor permuted so that it is contiguous, and the permutation.

    A tensor with gaps or overlaps is copied, to the memory format that torch's clone() chooses.
    """
    if 0 in shape:
        return tensor, None
    if 0 in tensor.stride():  # expanded, as the gradient of a sum is
        tensor = tensor.clone()
    order = order_of(shape, tensor.stride())
    laid = tensor if order is None else tensor.permute(order)
    if laid.is_contiguous():
        return laid, order
    return _in_memory_order(tensor.clone(), shape)


def _encode_sparse(tensor: Tensor, payload: _Payload, flags: int, device: str) -> TensorHeader:
    if tensor.layout not in _PARTS or device == META:
        where = f" on {META}" if device == META else ""
        raise _refusal(f"a tensor of layout {tensor.layout}{where}", "send it as to_dense()")
    tensor = tensor.cpu()
    if tensor.layout is torch.sparse_coo and tensor.is_coalesced():
        flags |= COALESCED
    # The values are the last part. None of these calls copies.
    dense = [getattr(tensor, name)() for name in _PARTS[tensor.layout]]
    parts = tuple(_encode_dense(part, payload) for part in dense)
    code, layout = parts[-1].dtype, LAYOUT_CODES[tensor.layout]
    return TensorHeader(code, tuple(tensor.shape), 0, flags, None, layout, device, parts)


def _refusal(what: str, way_out: str) -> NotSerializable:
    return NotSerializable(f"{what} cannot be serialized", hint=way_out)


class _Block:
    """The received bytes, claimed from front to back so that no two tensors overlap."""

    __slots__ = ("_end", "_length", "_payload")

    def __init__(self, payload: memoryview | None) -> None:
        assert payload is None or not payload.readonly, (
            "decoded tensors are writable: so must their block be"
        )
        self._payload = payload
        self._length = 0 if payload is None else payload.nbytes
        self._end = 0

    def claim(self, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
        """A flat tensor over the next bytes; it keeps the payload object alive."""
        if offset % ALIGNMENT or offset < self._end:
            raise _malformed(f"offset {offset} is not aligned, or overlaps the tensor before")
        end = offset + numel * dtype.itemsize
        if end > self._length:
            raise _malformed(f"bytes {offset} to {end} are outside a payload of {self._length}")
        self._end = end
        return torch.frombuffer(self._payload, dtype=dtype, count=numel, offset=offset)


def _rebuild(header: TensorHeader, block: _Block, arriving: Arriving | None) -> Tensor:
    device = header.device
    if arriving is None and (header.block is not None or device not in ("", META)):
        raise _malformed(f"it arrives on {device or 'a device'}, where it cannot")
    if header.layout != _STRIDED:
        tensor = _rebuild_sparse(header, block)
    else:
        tensor = _rebuild_dense(header, block, arriving)
    if arriving is None or device in ("", META) or header.block is not None:
        return tensor
    return arriving.place(tensor, device)


def _rebuild_dense(header: TensorHeader, block: _Block, arriving: Arriving | None = None) -> Tensor:
    if header.parts or header.flags & COALESCED:
        raise _malformed("a dense tensor has sparse parts")
    dtype, shape, order = DTYPES.get(header.dtype), header.shape, header.order
    if dtype is None:
        raise _malformed(f"dtype {header.dtype} is unknown to torch {torch.__version__}")
    is_row = len(shape) == 1 and shape[0] > 0 and not header.device  # `claim` bounds its bytes
    numel = shape[0] if is_row else _numel_of(shape, dtype.itemsize)
    if header.device == META or numel == 0:
        # Explicit, since torch.set_default_device changes the default of every factory.
        device, strides = META if header.device == META else "cpu", strides_of(shape, order)
        make = partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
        return _retry_after_warning(make)
    if header.block is not None:
        if arriving is None:
            raise _malformed("it arrives on a device, where it cannot")
        layout = Layout(shape, strides_of(shape, order), dtype, numel * dtype.itemsize)
        return arriving.take(header, layout)
    flat = block.claim(header.offset, dtype, numel)
    if order is not None:
        return flat.as_strided_(shape, strides_of(shape, order))
    return flat if len(shape) == 1 else flat.resize_(shape)


def _rebuild_sparse(header: TensorHeader, block: _Block) -> Tensor:
    layout = LAYOUTS.get(header.layout)
    if layout is None:
        raise _malformed(f"layout {header.layout} is unknown")
    is_strange = header.order is not None or header.device == META or header.block is not None
    if is_strange or len(header.parts) != len(_PARTS[layout]):
        raise _malformed(f"{len(header.parts)} parts do not make a tensor of layout {layout}")
    plain = (_STRIDED, 0, "", None)
    if any((part.layout, part.flags, part.device, part.block) != plain for part in header.parts):
        raise _malformed("a part of a sparse tensor is not a plain dense tensor")
    parts = [_rebuild_dense(part, block) for part in header.parts]
    dtype, coalesced = DTYPES.get(header.dtype), bool(header.flags & COALESCED)
    _numel_of(header.shape, parts[-1].dtype.itemsize)
    if any(part.dtype not in _INDEX_TYPES for part in parts[:-1]):
        raise _malformed("the indices of a sparse tensor are not integers")  # torch would cast them
    if parts[-1].dtype is not dtype or (coalesced and layout is not torch.sparse_coo):
        raise _malformed(f"the parts do not make a {layout} tensor of {dtype}")
    # The parts come from a peer: torch must check every index here, as its operators do not.
    make: Callable[..., Tensor]
    if layout is torch.sparse_coo:
        make = partial(torch.sparse_coo_tensor, is_coalesced=coalesced)
    else:
        make = partial(torch.sparse_compressed_tensor, layout=layout)
    make = partial(make, *parts, header.shape, device="cpu", check_invariants=True)
    try:
        return _retry_after_warning(make)
    except (RuntimeError, ValueError, TypeError, IndexError, Warning) as error:
        raise _malformed(f"not a valid {layout} tensor: {error}") from error


def _retry_after_warning(make: Callable[[], Tensor]) -> Tensor:
    try:
        return make()
    except Warning:
        # Torch warns once per process that a layout or a dtype is in beta. Where warnings are
        # errors, that must not lose the message; the second call does not warn.
        return make()


def _malformed(why: str) -> BadMessage:
    return BadMessage(f"a tensor header is wrong: {why}")


def _numel_of(shape: tuple[int, ...], itemsize: int) -> int:
    """The number of elements of a shape; raises if sizes or strides would overflow."""
    if len(shape) > _MAX_DIMS:
        raise _malformed(f"{len(shape)} dimensions are over the limit of {_MAX_DIMS}")
    # Torch computes the strides of an empty tensor too, as if no dimension were 0.
    span = 1
    for size in shape:
        if size < 0:
            raise _malformed(f"shape {shape} has a negative dimension")
        span *= size or 1
    if span * itemsize > _MAX_BYTES:
        raise _malformed(f"shape {shape} does not fit in memory")
    return 0 if 0 in shape else span


def strides_of(shape: tuple[int, ...], order: tuple[int, ...] | None) -> list[int]:
    """The strides of a tensor that fills its memory in this order of dimensions."""
    dims = range(len(shape))
    if order is not None and sorted(order) != list(dims):
        raise _malformed(f"order {order} is no permutation of {len(shape)} dimensions")
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(dims if order is None else order):
        strides[dim] = step
        step *= shape[dim] or 1
    return strides


def order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order of dimensions that strides suggest, whether memory is filled or not."""
    # Where strides tie, the dimension of size 1 is the inner one: this finds the strides again
    # that row-major and channels-last tensors give to dimensions of size 1.
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1)))
    return None if order == tuple(range(len(shape))) else order
