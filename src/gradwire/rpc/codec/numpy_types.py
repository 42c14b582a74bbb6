"""Encodes numpy arrays and scalars.

The bytes of an array of any dtype are sent as a flat uint8 tensor, so that large arrays are sent as
efficiently as tensors; the dtype is sent as numpy's short string for it. Only dtypes that this
string describes completely are sent: no objects, no fields. Numpy would make an array of pointers
from a peer's bytes if asked to, so the string is matched before numpy sees it.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import torch

from gradwire.errors import BadMessage, NotSerializable
from gradwire.rpc.codec.builtin_types import tensor_node
from gradwire.rpc.codec.walk import Decoder, Encoder, Node, Tag, TypeDecoder, TypeEncoder, exactly

Array = np.ndarray[Any, np.dtype[Any]]

_PLAIN_DTYPE = re.compile(r"[<>|][biufcmMSUV][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Zμ]{1,7}\])?")


def _encode_array(walk: Encoder, value: Array) -> object:
    dtype = _spelled(value.dtype)
    fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    rows = value.T if fortran else value
    if not (rows.flags.c_contiguous and rows.flags.writeable):
        rows = rows.copy()  # contiguous and writeable, as torch.from_numpy needs it
    _, index = tensor_node(walk, torch.from_numpy(rows.reshape(-1).view(np.uint8)))
    return [Tag.ARRAY, index, dtype, fortran, *value.shape]


def _decode_array(walk: Decoder, node: Node) -> object:
    _, index, text, fortran, *shape = node
    tensor = walk.tensor(index)
    if tensor.dtype is not torch.uint8 or tensor.layout is not torch.strided or not tensor.is_cpu:
        raise BadMessage(f"the bytes of an encoded array came as {tensor.dtype} on {tensor.device}")
    sizes = [exactly(size, int) for size in shape]
    if any(size < 0 for size in sizes):
        raise BadMessage(f"an encoded array has the shape {sizes}")
    items = tensor.numpy().view(_dtype(text))
    if (
        items.dtype.kind == "U"
        and (items.view(items.dtype.byteorder + "u4") > sys.maxunicode).any()
    ):
        raise BadMessage("an encoded array of text holds a code point that is no character")
    return items.reshape(sizes, order="F" if exactly(fortran, bool) else "C")


def _encode_scalar(walk: Encoder, value: np.generic) -> object:
    # Numpy drops zeros at the end of text, even in its own str(): only Python's is exact.
    if isinstance(value, np.str_):
        return [Tag.NUMPY_SCALAR, "U", walk.node(str.__str__(value))]
    if isinstance(value, np.bytes_):
        return [Tag.NUMPY_SCALAR, "S", bytes(value)]
    return [Tag.NUMPY_SCALAR, _spelled(value.dtype), value.tobytes()]


def _decode_scalar(walk: Decoder, node: Node) -> object:
    _, text, data = node
    if text == "U":
        return np.str_(exactly(walk.value(data), str))
    raw = exactly(data, bytes)
    if text == "S":
        return np.bytes_(raw)
    dtype = _dtype(text)
    if dtype.itemsize != len(raw) or dtype.kind in "US":
        raise BadMessage(f"an encoded numpy scalar of {dtype} has {len(raw)} bytes")
    return np.ndarray((), dtype, buffer=raw)[()]


def _spelled(dtype: np.dtype[Any]) -> str:
    text = dtype.str
    if _PLAIN_DTYPE.fullmatch(text) and dtype.itemsize and np.dtype(text) == dtype:
        return text
    raise NotSerializable(
        f"a numpy value of dtype {dtype} cannot be serialized",
        hint="send its fields as arrays of their own, or objects as a list",
    )


def _dtype(text: object) -> np.dtype[Any]:
    name = exactly(text, str)
    if not _PLAIN_DTYPE.fullmatch(name):
        raise BadMessage(f"numpy has no plain dtype {name!r:.40}")
    return np.dtype(name)


ENCODERS: dict[type, TypeEncoder] = {
    np.ndarray: _encode_array,
    **{kind: _encode_scalar for kind in set(np.sctypeDict.values()) if kind is not np.object_},
}

DECODERS: dict[int, TypeDecoder] = {
    Tag.ARRAY: _decode_array,
    Tag.NUMPY_SCALAR: _decode_scalar,
}
