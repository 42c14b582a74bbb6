"""The kinds of values that travel as what they are: how each becomes a node, and comes back.

Each kind is a pair of functions, side by side, and a line in the tables at the end. Kinds are of
exact types: a subclass is another type, and would arrive as something it is not. Arrays are in
numpy_types.py, what travels by a name in named_types.py: this file knows neither.

The unpackers raise whatever Python raises when a node does not fit; `Codec.unpack` turns it into
BadMessage. They check for themselves only what Python would let pass.
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
from gradwire.rpc.codec import tags
from gradwire.rpc.codec.walk import Node, Packer, Packing, Unpacker, Unpacking, exactly

D = TypeVar("D", bound=dict[object, object])

_WORD_TYPES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_WORDS = {str(word): word for word in vars(torch).values() if type(word) in _WORD_TYPES}


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


def _pack_list(walk: Packing, value: list[object]) -> object:
    return walk.children([tags.LIST], value, value, _by_index)


def _unpack_list(walk: Unpacking, node: Node) -> object:
    return walk.children(node)


def _pack_tuple(walk: Packing, value: tuple[object, ...]) -> object:
    return walk.children([tags.TUPLE], value, value, _by_index)


def _unpack_tuple(walk: Unpacking, node: Node) -> object:
    return tuple(walk.children(node))


def _pack_dict(walk: Packing, value: dict[object, object]) -> object:
    if not value:
        return [tags.DICT]
    return walk.children([tags.DICT], value, chain.from_iterable(value.items()), _by_key)


def _unpack_dict(walk: Unpacking, node: Node) -> object:
    if len(node) == 1:
        return {}
    return _filled({}, walk.children(node))


def _filled(value: D, flat: list[object]) -> D:
    """The dict, with the keys and values of a flat list of both."""
    value.update(zip(flat[::2], flat[1::2], strict=True))
    if 2 * len(value) != len(flat):
        raise BadMessage("a packed dict has a key twice")
    return value


def _pack_ordered_dict(walk: Packing, value: OrderedDict[object, object]) -> object:
    # What state_dict() returns, with the versions of its modules as an attribute.
    attributes = vars(value)
    if attributes.keys() - {"_metadata"}:
        raise NotSerializable(
            f"an OrderedDict with the attributes {sorted(attributes)} does not travel",
            hint="send the attributes beside it",
        )
    node = walk.children([tags.ORDERED_DICT], value, [attributes.get("_metadata")], _by_attribute)
    return walk.children(node, value, chain.from_iterable(value.items()), _by_key)


def _unpack_ordered_dict(walk: Unpacking, node: Node) -> object:
    metadata, *flat = walk.children(node)
    # Not OrderedDict[…](): that leaves an attribute on it, and it could not be sent on.
    empty: OrderedDict[object, object] = OrderedDict()
    value = _filled(empty, flat)
    if metadata is not None:
        value._metadata = metadata  # type: ignore[attr-defined]
    return value


def _pack_set(walk: Packing, value: set[object]) -> object:
    return walk.children([tags.SET], value, value, _in_set)


def _unpack_set(walk: Unpacking, node: Node) -> set[object]:
    items = walk.children(node)
    value = set(items)
    if len(value) != len(items):
        raise BadMessage("a packed set has an item twice")
    return value


def _pack_frozenset(walk: Packing, value: frozenset[object]) -> object:
    return walk.children([tags.FROZENSET], value, value, _in_set)


def _unpack_frozenset(walk: Unpacking, node: Node) -> object:
    return frozenset(_unpack_set(walk, node))


def pack_tensor(walk: Packing, value: Tensor) -> Node:
    """A tensor, listed once for each time it appears: aliasing is not kept."""
    tensors = walk.tensors
    tensors.append(value)
    return [tags.TENSOR, len(tensors) - 1]


def _unpack_tensor(walk: Unpacking, node: Node) -> object:
    _, index = node
    return walk.tensor(index)


def _pack_int(_: Packing, value: int) -> object:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return [tags.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _unpack_big_int(_walk: Unpacking, node: Node) -> object:
    _, data = node
    return int.from_bytes(exactly(data, bytes), "little", signed=True)


def _pack_str(_: Packing, value: str) -> object:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        # Names of files may hold bytes that are no UTF-8, as lone surrogates; msgpack refuses them.
        return [tags.SURROGATES, value.encode("utf-8", "surrogatepass")]
    return value


def _unpack_surrogates(_walk: Unpacking, node: Node) -> object:
    _, data = node
    return exactly(data, bytes).decode("utf-8", "surrogatepass")


def _pack_complex(_: Packing, value: complex) -> object:
    return [tags.COMPLEX, value.real, value.imag]


def _unpack_complex(_walk: Unpacking, node: Node) -> object:
    _, real, imag = node
    return complex(exactly(real, float), exactly(imag, float))


def _pack_slice(walk: Packing, value: slice) -> object:
    parts = (value.start, value.stop, value.step)
    return walk.children([tags.SLICE], value, parts, _by_attribute)


def _unpack_slice(walk: Unpacking, node: Node) -> object:
    start, stop, step = walk.children(node)
    return slice(start, stop, step)


def _pack_range(walk: Packing, value: range) -> object:
    parts = (value.start, value.stop, value.step)
    return walk.children([tags.RANGE], value, parts, _by_attribute)


def _unpack_range(walk: Unpacking, node: Node) -> object:
    start, stop, step = (exactly(part, int) for part in walk.children(node))
    return range(start, stop, step)


def _pack_ellipsis(_: Packing, __: EllipsisType) -> object:
    return [tags.ELLIPSIS]


def _unpack_ellipsis(_walk: Unpacking, node: Node) -> object:
    (_,) = node
    return ...


def _pack_bytearray(_: Packing, value: bytearray) -> object:
    return [tags.BYTEARRAY, bytes(value)]


def _unpack_bytearray(_walk: Unpacking, node: Node) -> object:
    _, data = node
    return bytearray(exactly(data, bytes))


def _pack_torch_word(_: Packing, value: object) -> object:
    return [tags.TORCH_WORD, str(value)]


def _unpack_torch_word(_walk: Unpacking, node: Node) -> object:
    _, name = node
    word = _WORDS.get(exactly(name, str))
    if word is None:
        raise BadMessage(f"torch {torch.__version__} has no {reprlib.repr(name)}")
    return word


def _pack_device(_: Packing, value: torch.device) -> object:
    return [tags.DEVICE, str(value)]


def _unpack_device(_walk: Unpacking, node: Node) -> object:
    _, name = node
    device = torch.device(exactly(name, str))
    # Torch takes the number of a device modulo 256.
    if str(device) != name:
        raise BadMessage(f"{reprlib.repr(name)} is no device")
    return device


def _pack_size(_: Packing, value: torch.Size) -> object:
    return [tags.SIZE, *value]


def _unpack_size(_walk: Unpacking, node: Node) -> object:
    sizes = [exactly(size, int) for size in node[1:]]
    # Torch would take a larger one, and fail when it is read.
    if any(not -(1 << 63) <= size < 1 << 63 for size in sizes):
        raise BadMessage("a packed torch.Size has a number over 64 bits")
    return torch.Size(sizes)


PACKERS: dict[type, Packer] = {
    list: _pack_list,
    tuple: _pack_tuple,
    dict: _pack_dict,
    set: _pack_set,
    frozenset: _pack_frozenset,
    Tensor: pack_tensor,
    Parameter: pack_tensor,
    int: _pack_int,
    str: _pack_str,
    complex: _pack_complex,
    slice: _pack_slice,
    range: _pack_range,
    EllipsisType: _pack_ellipsis,
    bytearray: _pack_bytearray,
    OrderedDict: _pack_ordered_dict,
    torch.device: _pack_device,
    torch.Size: _pack_size,
    **dict.fromkeys(_WORD_TYPES, _pack_torch_word),
}

UNPACKERS: dict[int, Unpacker] = {
    tags.LIST: _unpack_list,
    tags.TUPLE: _unpack_tuple,
    tags.DICT: _unpack_dict,
    tags.SET: _unpack_set,
    tags.FROZENSET: _unpack_frozenset,
    tags.TENSOR: _unpack_tensor,
    tags.BIG_INT: _unpack_big_int,
    tags.COMPLEX: _unpack_complex,
    tags.SLICE: _unpack_slice,
    tags.RANGE: _unpack_range,
    tags.ELLIPSIS: _unpack_ellipsis,
    tags.BYTEARRAY: _unpack_bytearray,
    tags.SURROGATES: _unpack_surrogates,
    tags.ORDERED_DICT: _unpack_ordered_dict,
    tags.TORCH_WORD: _unpack_torch_word,
    tags.DEVICE: _unpack_device,
    tags.SIZE: _unpack_size,
}
