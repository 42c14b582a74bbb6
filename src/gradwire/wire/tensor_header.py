"""The header of one tensor: all that is needed to rebuild it from raw bytes.

Codes of dtypes and layouts are part of the wire: add at the end, never reuse. Only `numel_of`
and `strides_of` interpret shape and order, and they refuse what torch could not hold.
This file makes no tensor and touches no buffer.
"""

from __future__ import annotations

import msgspec
import torch

from gradwire.errors import BadMessage

MAX_DIMS = 64
MAX_BYTES = (1 << 63) - 1

REQUIRES_GRAD = 1
INFERENCE = 2
COALESCED = 4
ALL_FLAGS = REQUIRES_GRAD | INFERENCE | COALESCED

META = "meta"

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
DTYPE_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}

STRIDED = 0
LAYOUTS: dict[int, torch.layout] = dict(
    enumerate(
        (
            torch.strided,
            torch.sparse_coo,
            torch.sparse_csr,
            torch.sparse_csc,
            torch.sparse_bsr,
            torch.sparse_bsc,
        )
    )
)
LAYOUT_CODES: dict[torch.layout, int] = {layout: code for code, layout in LAYOUTS.items()}


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The metadata of one tensor.

    `order` lists the dimensions from the outermost in memory to the innermost; None is row-major.
    `device` is "" for the cpu. A sparse tensor has no bytes itself but `parts`: the dense
    tensors it consists of, in the order of the arguments of torch's constructor.
    """

    dtype: int
    shape: tuple[int, ...]
    offset: int = 0
    flags: int = 0
    order: tuple[int, ...] | None = None
    layout: int = STRIDED
    device: str = ""
    parts: tuple[TensorHeader, ...] = ()

    @property
    def requires_grad(self) -> bool:
        """Whether the sender's tensor requires grad; a decoded tensor never does."""
        return bool(self.flags & REQUIRES_GRAD)

    @property
    def inference(self) -> bool:
        """Whether it is an inference tensor, at the sender and when decoded."""
        return bool(self.flags & INFERENCE)

    @property
    def coalesced(self) -> bool:
        """Whether the indices of a sparse COO tensor are sorted and unique."""
        return bool(self.flags & COALESCED)


def without_inference(header: TensorHeader) -> TensorHeader:
    """The header of the same tensor as a normal, not an inference tensor."""
    if not header.flags & INFERENCE:
        return header
    return msgspec.structs.replace(header, flags=header.flags & ~INFERENCE)


def malformed(why: str) -> BadMessage:
    """The error for a header that no correct peer sends."""
    return BadMessage(f"a tensor header is wrong: {why}")


def dtype_of(header: TensorHeader) -> torch.dtype:
    """The dtype for the header's code."""
    dtype = DTYPES.get(header.dtype)
    if dtype is None:
        raise malformed(f"dtype {header.dtype} is unknown to torch {torch.__version__}")
    return dtype


def numel_of(shape: tuple[int, ...], itemsize: int) -> int:
    """The number of elements of a shape; raises if sizes or strides would overflow."""
    if len(shape) > MAX_DIMS:
        raise malformed(f"{len(shape)} dimensions are over the limit of {MAX_DIMS}")
    # Torch computes the strides of an empty tensor too, as if no dimension were 0.
    span = 1
    for size in shape:
        if size < 0:
            raise malformed(f"shape {shape} has a negative dimension")
        span *= size or 1
    if span * itemsize > MAX_BYTES:
        raise malformed(f"shape {shape} does not fit in memory")
    return 0 if 0 in shape else span


def strides_of(shape: tuple[int, ...], order: tuple[int, ...] | None) -> list[int]:
    """The strides of a tensor that fills its memory in this order of dimensions."""
    dims = range(len(shape))
    if order is not None and sorted(order) != list(dims):
        raise malformed(f"order {order} is no permutation of {len(shape)} dimensions")
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(dims if order is None else order):
        strides[dim] = step
        step *= shape[dim] or 1
    return strides


def order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order of dimensions that strides suggest; whether memory is filled is not asked here.

    Where strides tie, the dimension of size 1 is the inner one: this finds the strides again that
    row-major and channels-last tensors give to dimensions of size 1.
    """
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1)))
    return None if order == tuple(range(len(shape))) else order
