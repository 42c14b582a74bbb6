"""The quick way for tensors in blocks of device memory, as `_maybe_encode_plain` is for the CPU.

What these functions refuse is encoded and decoded by tensor.py, which raises the errors.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from gradwire.options import Limits
from gradwire.wire.tensor import (
    DTYPE_CODES,
    DTYPES,
    INFERENCE,
    REQUIRES_GRAD,
    Layout,
    TensorHeader,
    strides_of,
)


def maybe_plain(tensor: Tensor) -> tuple[Tensor, int, tuple[int, ...], int] | None:
    """Of most tensors on a device: with the same bytes in a row, dtype, shape and flags.

    None for the others. hot: every message with tensors on a device
    """
    code, shape = DTYPE_CODES.get(tensor.dtype), tuple(tensor.shape)
    if code is None or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if 0 in shape or (1 in shape and len(shape) > 1) or tensor.is_conj() or tensor.is_neg():
        return None
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if tensor.is_inference():
        flags |= INFERENCE
    if not tensor.is_contiguous():
        if any(tensor.stride()) or flags:
            return None
        tensor = tensor.contiguous()  # one value for all, as the gradient of a sum is
    return tensor, code, shape, flags


def maybe_plain_layout(header: TensorHeader, limits: Limits) -> Layout | None:
    """How a tensor lies in a block of device memory, if it is as most are.

    None for the others, also for those that are wrong. hot: every message with tensors on a device
    """
    dtype, shape = DTYPES.get(header.dtype), header.shape
    if dtype is None or header.flags & ~REQUIRES_GRAD or header.layout or header.parts:
        return None
    if header.order is not None or torch.is_inference_mode_enabled():
        return None
    if min(shape, default=1) <= 0 or len(shape) > limits.dimensions:
        return None
    strides = (1,) if len(shape) == 1 else strides_of(shape, None)
    return Layout(shape, strides, dtype, prod(shape) * dtype.itemsize)
