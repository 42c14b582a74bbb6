"""Encodes the types of Python and torch that travel without a name, each by a pair of functions.

Each pair has a line in the tables at the end. Types are matched exactly: a subclass would arrive as
its base. Arrays are in numpy_types.py, and values that travel by a name in named_types.py.

The decoders raise what Python raises when a node does not fit, and `Codec.decode` turns that into
BadMessage. They check only what Python would let pass.
"""

from __future__ import annotations

import reprlib
from collections import OrderedDict
from itertools import chain
from types import EllipsisType
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.errors import BadMessage, NotSerializable
from gradwire.rpc.codec.walk import Decoder, Encoder, Node, Tag, TypeDecoder, TypeEncoder, exactly

D = TypeVar("D", bound=dict[object, object])

_CONSTANT_TYPES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_CONSTANTS = {str(each): each for each in vars(torch).values() if type(each) in _CONSTANT_TYPES}


def _by_index(_: object, n: int) -> str:
    return f"[{n}]"


def _by_key(owner: dict[object, object], n: int) -> str:
    if n % 2 == 0:
        return f".keys()[{n // 2}]"
    key = list(owner)[n // 2]
    return f'["{key}"]' if type(key) is str else f"[{reprlib.repr(key)}]"


def _by_attribute(owner: object, n: int) -> str:
    names = ("_metadata",) if type(owner) is OrderedDict else ("start", "stop", "step")
    return f".{names[n]}"


def _in_set(_: object, __: int) -> str:
    return "{...}"


def _encode_list(walk: Encoder, value: list[object]) -> object:
    return walk.children([Tag.LIST], value, value, _by_index)


def _decode_list(walk: Decoder, node: Node) -> object:
    return walk.children(node)


def _encode_tuple(walk: Encoder, value: tuple[object, ...]) -> object:
    return walk.children([Tag.TUPLE], value, value, _by_index)


def _decode_tuple(walk: Decoder, node: Node) -> object:
    return tuple(walk.children(node))


def _encode_dict(walk: Encoder, value: dict[object, object]) -> object:
    if not value:
        return [Tag.DICT]
    return walk.children([Tag.DICT], value, chain.from_iterable(value.items()), _by_key)


def _decode_dict(walk: Decoder, node: Node) -> object:
    if len(node) == 1:
        return {}
    return _filled({}, walk.children(node))


def _filled(value: D, flat: list[object]) -> D:
    """The dict, filled from a flat list of keys and values in turn."""
    value.update(zip(flat[::2], flat[1::2], strict=True))
    if 2 * len(value) != len(flat):
        raise BadMessage("an encoded dict has a key twice")
    return value


def _encode_ordered_dict(walk: Encoder, value: OrderedDict[object, object]) -> object:
    # state_dict() returns one, with the versions of its modules as an attribute.
    attributes = vars(value)
    if attributes.keys() - {"_metadata"}:
        raise NotSerializable(
            f"an OrderedDict with the attributes {sorted(attributes)} does not travel",
            hint="send the attributes beside it",
        )
    node = walk.children([Tag.ORDERED_DICT], value, [attributes.get("_metadata")], _by_attribute)
    return walk.children(node, value, chain.from_iterable(value.items()), _by_key)


def _decode_ordered_dict(walk: Decoder, node: Node) -> object:
    metadata, *flat = walk.children(node)
    # Not OrderedDict[…](): that sets an attribute on it, and it could not be sent again.
    empty: OrderedDict[object, object] = OrderedDict()
    value = _filled(empty, flat)
    if metadata is not None:
        value._metadata = metadata  # type: ignore[attr-defined]
    return value


def _encode_set(walk: Encoder, value: set[object]) -> object:
    return walk.children([Tag.SET], value, value, _in_set)


def _decode_set(walk: Decoder, node: Node) -> set[object]:
    items = walk.children(node)
    value = set(items)
    if len(value) != len(items):
        raise BadMessage("an encoded set has an item twice")
    return value


def _encode_frozenset(walk: Encoder, value: frozenset[object]) -> object:
    return walk.children([Tag.FROZENSET], value, value, _in_set)


def _decode_frozenset(walk: Decoder, node: Node) -> object:
    return frozenset(_decode_set(walk, node))


def tensor_node(walk: Encoder, value: Tensor) -> Node:
    """Add a tensor to the list, once for each time it appears: aliasing is not kept."""
    tensors = walk.tensors
    tensors.append(value)
    return [Tag.TENSOR, len(tensors) - 1]


def _decode_tensor(walk: Decoder, node: Node) -> object:
    _, index = node
    return walk.tensor(index)


def _encode_int(_: Encoder, value: int) -> object:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return [Tag.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _decode_big_int(_walk: Decoder, node: Node) -> object:
    _, data = node
    return int.from_bytes(exactly(data, bytes), "little", signed=True)


def _encode_str(_: Encoder, value: str) -> object:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        # File names may hold bytes that are not UTF-8, as lone surrogates; msgpack refuses them.
        return [Tag.SURROGATES, value.encode("utf-8", "surrogatepass")]
    return value


def _decode_surrogates(_walk: Decoder, node: Node) -> object:
    _, data = node
    return exactly(data, bytes).decode("utf-8", "surrogatepass")


def _encode_complex(_: Encoder, value: complex) -> object:
    return [Tag.COMPLEX, value.real, value.imag]


def _decode_complex(_walk: Decoder, node: Node) -> object:
    _, real, imag = node
    return complex(exactly(real, float), exactly(imag, float))


def _encode_slice(walk: Encoder, value: slice) -> object:
    parts = (value.start, value.stop, value.step)
    return walk.children([Tag.SLICE], value, parts, _by_attribute)


def _decode_slice(walk: Decoder, node: Node) -> object:
    start, stop, step = walk.children(node)
    return slice(start, stop, step)


def _encode_range(walk: Encoder, value: range) -> object:
    parts = (value.start, value.stop, value.step)
    return walk.children([Tag.RANGE], value, parts, _by_attribute)


def _decode_range(walk: Decoder, node: Node) -> object:
    start, stop, step = (exactly(part, int) for part in walk.children(node))
    return range(start, stop, step)


def _encode_ellipsis(_: Encoder, __: EllipsisType) -> object:
    return [Tag.ELLIPSIS]


def _decode_ellipsis(_walk: Decoder, node: Node) -> object:
    (_,) = node
    return ...


def _encode_bytearray(_: Encoder, value: bytearray) -> object:
    return [Tag.BYTEARRAY, bytes(value)]


def _decode_bytearray(_walk: Decoder, node: Node) -> object:
    _, data = node
    return bytearray(exactly(data, bytes))


def _encode_torch_constant(_: Encoder, value: object) -> object:
    return [Tag.TORCH_CONSTANT, str(value)]


def _decode_torch_constant(_walk: Decoder, node: Node) -> object:
    _, name = node
    constant = _CONSTANTS.get(exactly(name, str))
    if constant is None:
        raise BadMessage(f"torch {torch.__version__} has no {reprlib.repr(name)}")
    return constant


def _encode_device(_: Encoder, value: torch.device) -> object:
    return [Tag.DEVICE, str(value)]


def _decode_device(_walk: Decoder, node: Node) -> object:
    _, name = node
    device = torch.device(exactly(name, str))
    # Torch takes the index of a device modulo 256.
    if str(device) != name:
        raise BadMessage(f"{reprlib.repr(name)} is no device")
    return device


def _encode_size(_: Encoder, value: torch.Size) -> object:
    return [Tag.SIZE, *value]


def _decode_size(_walk: Decoder, node: Node) -> object:
    sizes = [exactly(size, int) for size in node[1:]]
    # Torch would accept a larger one, and fail when it is read.
    if any(not -(1 << 63) <= size < 1 << 63 for size in sizes):
        raise BadMessage("an encoded torch.Size has a number over 64 bits")
    return torch.Size(sizes)


ENCODERS: dict[type, TypeEncoder] = {
    list: _encode_list,
    tuple: _encode_tuple,
    dict: _encode_dict,
    set: _encode_set,
    frozenset: _encode_frozenset,
    Tensor: tensor_node,
    Parameter: tensor_node,
    int: _encode_int,
    str: _encode_str,
    complex: _encode_complex,
    slice: _encode_slice,
    range: _encode_range,
    EllipsisType: _encode_ellipsis,
    bytearray: _encode_bytearray,
    OrderedDict: _encode_ordered_dict,
    torch.device: _encode_device,
    torch.Size: _encode_size,
    **dict.fromkeys(_CONSTANT_TYPES, _encode_torch_constant),
}

DECODERS: dict[int, TypeDecoder] = {
    Tag.LIST: _decode_list,
    Tag.TUPLE: _decode_tuple,
    Tag.DICT: _decode_dict,
    Tag.SET: _decode_set,
    Tag.FROZENSET: _decode_frozenset,
    Tag.TENSOR: _decode_tensor,
    Tag.BIG_INT: _decode_big_int,
    Tag.COMPLEX: _decode_complex,
    Tag.SLICE: _decode_slice,
    Tag.RANGE: _decode_range,
    Tag.ELLIPSIS: _decode_ellipsis,
    Tag.BYTEARRAY: _decode_bytearray,
    Tag.SURROGATES: _decode_surrogates,
    Tag.ORDERED_DICT: _decode_ordered_dict,
    Tag.TORCH_CONSTANT: _decode_torch_constant,
    Tag.DEVICE: _decode_device,
    Tag.SIZE: _decode_size,
}
