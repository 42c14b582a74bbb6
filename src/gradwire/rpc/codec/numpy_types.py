"""Encodes the arrays and scalars of numpy.

The bytes of an array are sent as a flat uint8 tensor, so that large arrays are sent as efficiently
as tensors; the dtype is sent as numpy's short string for it, or as a list of fields. Only dtypes
that this describes completely are sent: no objects. Numpy would make an array of pointers from a
peer's bytes if asked to, so every string is matched before numpy sees it.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any, Final

import numpy as np
import torch

from gradwire.errors import BadMessage, NotSerializable
from gradwire.rpc.codec.builtin_types import tensor_node
from gradwire.rpc.codec.walk import Decoder, Encoder, Node, Tag, TypeDecoder, TypeEncoder, exactly

Array = np.ndarray[Any, np.dtype[Any]]
Dtype = np.dtype[Any]

_PLAIN_DTYPE = re.compile(r"[<>|][biufcmMSUV][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Zμ]{1,7}\])?")
_MOST_FIELDS: Final = 1 << 10
_MOST_BYTES: Final = 1 << 30
"""of one item, so that no product of sizes overflows in numpy"""
_ONE_RECORD: Final = None
"""in the place of an array's order: the value is a scalar with fields"""


def _encode_array(walk: Encoder, value: Array) -> object:
    fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    if value.dtype.names is None:
        return _array_node(walk, value, Tag.ARRAY, _spelled(value.dtype), fortran)
    return _array_node(walk, value, Tag.RECORDS, _described(value.dtype), fortran)


def _array_node(walk: Encoder, value: Array, tag: int, dtype: object, order: bool | None) -> Node:
    rows = value.T if order else value
    if not (rows.flags.c_contiguous and rows.flags.writeable):
        rows = rows.copy()  # contiguous and writeable, as torch.from_numpy needs it
    _, index = tensor_node(walk, torch.from_numpy(rows.reshape(-1).view(np.uint8)))
    return [tag, index, dtype, order, *value.shape]


def _decode_array(walk: Decoder, node: Node) -> object:
    _, index, text, fortran, *shape = node
    return _array_of(walk, index, _dtype(text), exactly(fortran, bool), shape)


def _decode_records(walk: Decoder, node: Node) -> object:
    _, index, fields, order, *shape = node
    dtype = _dtype_of(fields)
    if order is not _ONE_RECORD:
        return _array_of(walk, index, dtype, exactly(order, bool), shape)
    return _array_of(walk, index, dtype, False, shape)[()]


def _array_of(
    walk: Decoder, index: object, dtype: Dtype, fortran: bool, shape: list[object]
) -> Array:
    tensor = walk.tensor(index)
    if tensor.dtype is not torch.uint8 or tensor.layout is not torch.strided or not tensor.is_cpu:
        raise BadMessage(f"the bytes of an encoded array came as {tensor.dtype} on {tensor.device}")
    sizes = [exactly(size, int) for size in shape]
    if any(size < 0 for size in sizes):
        raise BadMessage(f"an encoded array has the shape {sizes}")
    items: Array = tensor.numpy().view(dtype)
    _check_text(items)
    return items.reshape(sizes, order="F" if fortran else "C")


def _check_text(items: Array) -> None:
    """BadMessage if text in an array, or in a field of it, holds what is no character."""
    dtype = items.dtype
    for name in dtype.names or ():
        _check_text(items[name])
    if dtype.kind == "U":
        letters = np.ascontiguousarray(items).view(dtype.byteorder + "u4")
        if (letters > sys.maxunicode).any():
            raise BadMessage("an encoded array of text holds a code point that is no character")


def _encode_scalar(walk: Encoder, value: np.generic) -> object:
    # Numpy drops zeros at the end of text, even in its own str(): only Python's is exact.
    if isinstance(value, np.str_):
        return [Tag.NUMPY_SCALAR, "U", walk.node(str.__str__(value))]
    if isinstance(value, np.bytes_):
        return [Tag.NUMPY_SCALAR, "S", bytes(value)]
    if value.dtype.names is not None:
        one = np.array(value)
        return _array_node(walk, one, Tag.RECORDS, _described(value.dtype), _ONE_RECORD)
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


def _spelled(dtype: Dtype) -> str:
    text = dtype.str
    if _PLAIN_DTYPE.fullmatch(text) and dtype.itemsize and np.dtype(text) == dtype:
        return text
    raise _unsendable(dtype)


def _unsendable(dtype: Dtype) -> NotSerializable:
    return NotSerializable(
        f"a numpy value of dtype {dtype} cannot be serialized",
        hint="send objects as a list, and views as arrays of plain numbers or text",
    )


def _dtype(text: object) -> Dtype:
    name = exactly(text, str)
    if not _PLAIN_DTYPE.fullmatch(name):
        raise BadMessage(f"numpy has no plain dtype {name!r:.40}")
    return np.dtype(name)


# -- fields: [bytes of one item, name, offset, shape, dtype, name, …]


def _described(dtype: Dtype) -> Node:
    """A dtype with fields as a node; NotSerializable if numpy would not make the same of it."""
    node: Node = [dtype.itemsize]
    for name in dtype.names or ():
        field, offset = dtype.fields[name][:2]  # type: ignore[index]  # it has names
        base = field.base
        inner = _spelled(base) if base.names is None else _described(base)
        node += [name, offset, list(field.shape), inner]
    try:
        again = _dtype_of(node)
    except BadMessage:
        again = None
    if again != dtype or again.metadata or dtype.metadata or dtype.type is not np.void:
        raise _unsendable(dtype)
    if again.isalignedstruct is not dtype.isalignedstruct:
        raise _unsendable(dtype)
    return node


def _dtype_of(described: object) -> Dtype:
    size, *flat = exactly(described, list)
    size = _checked_size(size, _MOST_BYTES)
    if not flat or len(flat) % 4 or len(flat) > 4 * _MOST_FIELDS:
        raise BadMessage(f"an encoded dtype has {len(flat)} parts of fields")
    names = [exactly(name, str) for name in flat[::4]]
    offsets = [_checked_size(offset, size) for offset in flat[1::4]]
    formats = [
        _field_of(inner, exactly(shape, list), size - offset)
        for offset, shape, inner in zip(offsets, flat[2::4], flat[3::4], strict=True)
    ]
    spec = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
    return np.dtype(spec)  # type: ignore[call-overload,no-any-return]  # numpy's stub has no dict


def _field_of(inner: object, shape: list[object], room: int) -> Dtype:
    base = _dtype(inner) if type(inner) is str else _dtype_of(inner)
    sizes = tuple(_checked_size(size, _MOST_BYTES) for size in shape)
    if not base.itemsize or len(sizes) > 32 or base.itemsize * math.prod(sizes) > room:
        raise BadMessage(f"a field of {sizes} times {base} does not fit into {room} bytes")
    return np.dtype((base, sizes)) if sizes else base


def _checked_size(size: object, most: int) -> int:
    if not 0 <= exactly(size, int) <= most:
        raise BadMessage(f"an encoded dtype has a size of {size}, where {most} is the most")
    return size  # type: ignore[return-value]


ENCODERS: dict[type, TypeEncoder] = {
    np.ndarray: _encode_array,
    **{kind: _encode_scalar for kind in set(np.sctypeDict.values()) if kind is not np.object_},
}

DECODERS: dict[int, TypeDecoder] = {
    Tag.ARRAY: _decode_array,
    Tag.NUMPY_SCALAR: _decode_scalar,
    Tag.RECORDS: _decode_records,
}
