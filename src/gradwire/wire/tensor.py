"""Encoding of tensors as headers and raw buffers, and decoding, with as few copies as possible.

Encoding returns views of the tensors' memory. It copies in three cases, each in its own
function: another device (`_staged`), memory with gaps or overlaps (`_compacted`), and a tensor with
a conjugate, negative or zero-tensor bit, which has no such bytes in memory (`_Payload.append`).

Decoding copies nothing: every tensor uses the memory of the received block and keeps it alive. Each
has its own storage over its own bytes, so no tensor is a view of another, `deepcopy` and
`torch.save` copy only its bytes, and each has its own version counter. Headers come from a
peer: every number is checked before torch sees it.

Torch does not resize memory that it shares with a buffer: neither a tensor that was sent nor one
that was received can grow with `resize_`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.errors import BadMessage, NotSerializable, OverLimit
from gradwire.options import Limits
from gradwire.wire.frame import ALIGNMENT, Buffer
from gradwire.wire.tensor_header import (
    ALL_FLAGS,
    COALESCED,
    DTYPE_CODES,
    INFERENCE,
    LAYOUT_CODES,
    LAYOUTS,
    MAX_DIMS,
    META,
    REQUIRES_GRAD,
    STRIDED,
    TensorHeader,
    dtype_of,
    malformed,
    numel_of,
    order_of,
    strides_of,
)

__all__ = ["TensorHeader", "decode_tensors", "encode_tensors"]

_LIMITS = Limits()
_INDEX_TYPES = (torch.int64, torch.int32)
_PADDING = tuple(bytes(n) for n in range(ALIGNMENT))
_NAMES_WITHOUT_NUMPY = ("torch.bfloat16", "torch.complex32", "torch.float8", "torch.float4")
_WITHOUT_NUMPY = {dtype for dtype in DTYPE_CODES if str(dtype).startswith(_NAMES_WITHOUT_NUMPY)}

_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")

PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}


def encode_tensors(
    tensors: Sequence[Tensor], limits: Limits = _LIMITS
) -> tuple[list[TensorHeader], list[Buffer]]:
    """Encode tensors as headers, and buffers whose concatenation is the payload.

    The buffers are views: they keep the tensors alive, and a write to a tensor before the send is
    over changes what is sent.

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
        for tensor in tensors:
            headers.append(_encode(tensor, payload))  # noqa: PERF401  (an error names the index)
    except NotSerializable as refusal:
        raise refusal.inside(f"tensors[{len(headers)}]") from None
    return headers, payload.buffers


def decode_tensors(
    headers: Sequence[TensorHeader], payload: memoryview | None, limits: Limits = _LIMITS
) -> list[Tensor]:
    """Decode tensors in place: each keeps the `payload` object alive.

    `payload` must be writable, must not be released by hand, and only the tensors may write to it.

    hot: every message with tensors
    """
    if len(headers) > limits.tensors:
        raise OverLimit(f"{len(headers)} tensors are over the limit of {limits.tensors}")
    if limits.dimensions < MAX_DIMS and any(len(h.shape) > limits.dimensions for h in headers):
        raise OverLimit(f"a tensor has more than {limits.dimensions} dimensions, the limit")
    block = _Block(payload)
    tensors: list[Tensor] = []
    for header in headers:
        flags = header.flags
        if flags & ~ALL_FLAGS:
            raise malformed(f"flags {flags:#x} are unknown")
        # This thread may be inside inference_mode; what counts is the mode of the sender.
        if torch.is_inference_mode_enabled() is not bool(flags & INFERENCE):
            with torch.inference_mode(bool(flags & INFERENCE)):
                tensors.append(_rebuild(header, block))
        else:
            tensors.append(_rebuild(header, block))
    return tensors


class _Payload:
    """The buffers of a payload being encoded, each tensor at a multiple of ALIGNMENT."""

    __slots__ = ("_end", "buffers")

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._end = 0

    def append(self, tensor: Tensor) -> int:
        """Add the bytes of a contiguous tensor and return their offset.

        Adds a view, or a copy if the tensor is conjugate, negative or a zero tensor.
        """
        try:
            if tensor.dtype in _WITHOUT_NUMPY:
                tensor = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
            view = tensor.numpy(force=True).data.cast("B")
        except RuntimeError as error:
            raise _refusal("a tensor without its own memory", f"torch says: {error}") from error
        offset = self._end
        if offset:
            gap = -offset % ALIGNMENT
            if gap:
                self.buffers.append(_PADDING[gap])
                offset += gap
        self.buffers.append(view)
        self._end = offset + len(view)
        return offset


def _encode(tensor: Tensor, payload: _Payload) -> TensorHeader:
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise _refusal(f"a tensor of type {name}", "send a plain torch.Tensor made of it")
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if tensor.is_inference():
        flags |= INFERENCE
    if tensor.is_cpu and tensor.layout is torch.strided:
        return _encode_dense(tensor, payload, flags)
    device = "" if tensor.is_cpu else str(tensor.device)
    if tensor.layout is not torch.strided:
        return _encode_sparse(tensor.detach(), payload, flags, device)
    if device != META:
        tensor = _staged(tensor)
    return _encode_dense(tensor, payload, flags, device)


def _encode_dense(
    tensor: Tensor, payload: _Payload, flags: int = 0, device: str = ""
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
    offset = 0
    if device != META and 0 not in shape:
        offset = payload.append(tensor)
    return TensorHeader(code, shape, offset, flags, order, STRIDED, device)


def _in_memory_order(
    tensor: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...] | None]:
    """The tensor with its dimensions permuted so that it is contiguous, and the permutation."""
    if 0 in shape:
        return tensor, None
    if len(shape) == 1:
        return _compacted(tensor), None
    if 0 in tensor.stride():  # expanded, as the gradient of a sum is
        tensor = _compacted(tensor)
    order = order_of(shape, tensor.stride())
    laid = tensor if order is None else tensor.permute(order)
    if laid.is_contiguous():
        return laid, order
    return _in_memory_order(_compacted(tensor), shape)


def _compacted(tensor: Tensor) -> Tensor:
    """A copy without gaps and overlaps, in the memory format that torch's clone() chooses."""
    return tensor.clone()


def _staged(tensor: Tensor) -> Tensor:
    """A copy in CPU memory."""
    return tensor.detach().cpu()


def _encode_sparse(tensor: Tensor, payload: _Payload, flags: int, device: str) -> TensorHeader:
    if tensor.layout not in PARTS or device == META:
        where = f" on {META}" if device == META else ""
        raise _refusal(f"a tensor of layout {tensor.layout}{where}", "send it as to_dense()")
    if device:
        tensor = _staged(tensor)
    if tensor.layout is torch.sparse_coo and tensor.is_coalesced():
        flags |= COALESCED
    parts = tuple(_encode_dense(part, payload) for part in take_apart(tensor))
    code, layout = parts[-1].dtype, LAYOUT_CODES[tensor.layout]
    return TensorHeader(code, tuple(tensor.shape), 0, flags, None, layout, device, parts)


def _refusal(what: str, way_out: str) -> NotSerializable:
    return NotSerializable(f"{what} does not travel", hint=way_out)


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
            raise malformed(f"offset {offset} is not aligned, or overlaps the tensor before")
        end = offset + numel * dtype.itemsize
        if end > self._length:
            raise malformed(f"bytes {offset} to {end} are outside a payload of {self._length}")
        self._end = end
        return torch.frombuffer(self._payload, dtype=dtype, count=numel, offset=offset)


def _rebuild(header: TensorHeader, block: _Block) -> Tensor:
    device = header.device
    if not device and header.layout == STRIDED:
        return _rebuild_dense(header, block)
    rebuild = _rebuild_dense if header.layout == STRIDED else _rebuild_sparse
    tensor = rebuild(header, block)
    return _placed(tensor, device) if device and device != META else tensor


def _rebuild_dense(header: TensorHeader, block: _Block) -> Tensor:
    if header.parts or header.flags & COALESCED:
        raise malformed("a dense tensor has sparse parts")
    dtype, shape, order = dtype_of(header), header.shape, header.order
    numel = numel_of(shape, dtype.itemsize)
    if header.device == META or numel == 0:
        # Explicit, since torch.set_default_device changes the default of every factory.
        device = META if header.device == META else "cpu"
        strides = strides_of(shape, order)
        return _retry_after_warning(
            lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)
        )
    flat = block.claim(header.offset, dtype, numel)
    if order is not None:
        return flat.as_strided_(shape, strides_of(shape, order))
    return flat if len(shape) == 1 else flat.resize_(shape)


def _rebuild_sparse(header: TensorHeader, block: _Block) -> Tensor:
    layout = LAYOUTS.get(header.layout)
    if layout is None:
        raise malformed(f"layout {header.layout} is unknown")
    dtype = dtype_of(header)
    numel_of(header.shape, dtype.itemsize)
    if len(header.parts) != len(PARTS[layout]) or header.order is not None or header.device == META:
        raise malformed(f"{len(header.parts)} parts do not make a tensor of layout {layout}")
    if any(part.layout != STRIDED or part.flags or part.device for part in header.parts):
        raise malformed("a part of a sparse tensor is not a plain dense tensor")
    parts = [_rebuild_dense(part, block) for part in header.parts]
    if any(part.dtype not in _INDEX_TYPES for part in parts[:-1]):
        raise malformed("the indices of a sparse tensor are not integers")  # torch would cast them
    if parts[-1].dtype is not dtype or (header.coalesced and layout is not torch.sparse_coo):
        raise malformed(f"the parts do not make a {layout} tensor of {dtype}")
    try:
        return _retry_after_warning(
            lambda: put_together(parts, header.shape, layout, header.coalesced)
        )
    except (RuntimeError, ValueError, TypeError, IndexError, Warning) as error:
        raise malformed(f"not a valid {layout} tensor: {error}") from error


def _retry_after_warning(make: Callable[[], Tensor]) -> Tensor:
    """Call `make`, and once more if it raises a warning.

    Torch warns once per process that a layout or a dtype is in beta. Where warnings are errors,
    that must not lose the message; the second call does not warn.
    """
    try:
        return make()
    except Warning:
        return make()


def _placed(tensor: Tensor, name: str) -> Tensor:
    """A copy on the device called `name`."""
    kind = torch.accelerator.current_accelerator()
    count = 0 if kind is None else torch.accelerator.device_count()
    if name not in [f"{kind}:{index}" for index in range(count)]:
        raise BadMessage(
            f"a tensor of device {name!r} arrived, but this worker has no such device",
            hint="send tensor.cpu() and move it where it is used",
        )
    try:
        return tensor.to(name)
    except RuntimeError as error:
        raise BadMessage(f"a tensor could not be placed on {name}: {error}") from error


def take_apart(tensor: Tensor) -> list[Tensor]:
    """The dense parts of a detached sparse tensor, the values last; no copy."""
    return [getattr(tensor, name)() for name in PARTS[tensor.layout]]


def put_together(
    parts: list[Tensor], shape: tuple[int, ...], layout: torch.layout, coalesced: bool
) -> Tensor:
    """Build a sparse tensor from its parts; raises what torch raises if they do not fit.

    The parts may come from a peer: torch must check every index here, as its operators do not.
    """
    if layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, shape, device="cpu", is_coalesced=coalesced, check_invariants=True
        )
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, device="cpu", check_invariants=True
    )
