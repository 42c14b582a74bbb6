"""Encodes builtin types of Python, and types of torch that need no name, by the tables at the end.

Types are matched exactly: a subclass would arrive as its base. Values that are sent by a name are
in named_types.py, those of numpy in numpy_types.py, those of the library in standard_types.py.

The decoders raise what Python raises when a node does not fit, and `Codec.decode` turns that into
BadMessage. They check only what Python would let pass.
"""

from __future__ import annotations

import reprlib
from collections import OrderedDict
from itertools import chain
from types import EllipsisType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.errors import BadMessage, NotSerializable
from gradwire.rpc.codec.walk import Decoder, Encoder, Node, Tag, TypeDecoder, TypeEncoder, exactly

D = TypeVar("D", bound=dict[Any, Any])

_CONSTANT_TYPES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_CONSTANTS = {str(each): each for each in vars(torch).values() if type(each) in _CONSTANT_TYPES}


def by_index(_: object, n: int) -> str:
    """How errors name the n-th value in a sequence."""
    return f"[{n}]"


def by_key(owner: Any, n: int) -> str:  # noqa: ANN401  (a dict)
    """How errors name the n-th value in a flat list of keys and values."""
    if n % 2 == 0:
        return f".keys()[{n // 2}]"
    key = list(owner)[n // 2]
    return f'["{key}"]' if type(key) is str else f"[{reprlib.repr(key)}]"


def filled(value: D, flat: list[object]) -> D:
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
            f"an OrderedDict with the attributes {sorted(attributes)} cannot be serialized",
            hint="send the attributes beside it",
        )
    metadata = [attributes.get("_metadata")]
    node = walk.children([Tag.ORDERED_DICT], value, metadata, lambda *_: "._metadata")
    return walk.children(node, value, chain.from_iterable(value.items()), by_key)


def _decode_ordered_dict(walk: Decoder, node: Node) -> object:
    metadata, *flat = walk.children(node)
    # Not OrderedDict[…](): that sets an attribute on it, and it could not be sent again.
    empty: OrderedDict[object, object] = OrderedDict()
    value = filled(empty, flat)
    if metadata is not None:
        value._metadata = metadata  # type: ignore[attr-defined]
    return value


def _decode_set(walk: Decoder, node: Node) -> set[object]:
    items = walk.children(node)
    value = set(items)
    if len(value) != len(items):
        raise BadMessage("an encoded set has an item twice")
    return value


def tensor_node(walk: Encoder, value: Tensor) -> Node:
    """Add a tensor to the list; the second time it appears, name it again.

    It arrives as one object, as in one process. Views of one memory are tensors of their own.
    """
    places, tensors = walk.places, walk.tensors
    if (known := places.get(id(value))) is not None:
        return [Tag.SAME_TENSOR, known]
    places[id(value)] = len(tensors)
    tensors.append(value)
    return [Tag.TENSOR, len(tensors) - 1]


def _encode_generator(walk: Encoder, value: torch.Generator) -> object:
    if value.device.type != "cpu":
        raise NotSerializable(
            f"a generator on {value.device} cannot be serialized",
            hint="send its get_state(), and set_state() it there",
        )
    _, index = tensor_node(walk, value.get_state())
    return [Tag.GENERATOR, index]


def _decode_generator(walk: Decoder, node: Node) -> object:
    _, index = node
    generator = torch.Generator()
    generator.set_state(walk.tensor(index))  # checks its type, its size and what it says
    return generator


def _encode_int(_: Encoder, value: int) -> object:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return [Tag.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _encode_str(_: Encoder, value: str) -> object:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        # File names may hold bytes that are not UTF-8, as lone surrogates; msgpack refuses them.
        return [Tag.SURROGATES, value.encode("utf-8", "surrogatepass")]
    return value


def _decode_torch_constant(_walk: Decoder, node: Node) -> object:
    _, name = node
    constant = _CONSTANTS.get(exactly(name, str))
    if constant is None:
        raise BadMessage(f"torch {torch.__version__} has no {reprlib.repr(name)}")
    return constant


def _decode_device(_walk: Decoder, node: Node) -> object:
    _, name = node
    device = torch.device(exactly(name, str))
    # Torch takes the index of a device modulo 256.
    if str(device) != name:
        raise BadMessage(f"{reprlib.repr(name)} is no device")
    return device


def _decode_size(_walk: Decoder, node: Node) -> object:
    sizes = [exactly(size, int) for size in node[1:]]
    # Torch would accept a larger one, and fail when it is read.
    if any(not -(1 << 63) <= size < 1 << 63 for size in sizes):
        raise BadMessage("an encoded torch.Size has a number over 64 bits")
    return torch.Size(sizes)


def _encode_dict(walk: Encoder, value: dict[object, object]) -> object:
    items = chain.from_iterable(value.items())
    return walk.children([Tag.DICT], value, items, by_key) if value else [Tag.DICT]


def _encode_bounds(walk: Encoder, tag: int, value: slice | range) -> object:
    names = ("start", "stop", "step")
    bounds = [getattr(value, name) for name in names]
    return walk.children([tag], value, bounds, lambda _, n: f".{names[n]}")


def _range_of(start: object, stop: object, step: object) -> range:
    return range(exactly(start, int), exactly(stop, int), exactly(step, int))


def _slice_of(start: object, stop: object, step: object) -> slice:
    return slice(start, stop, step)


def _data_of(node: Node) -> bytes:
    _, data = node
    return exactly(data, bytes)


def _ellipsis_of(_tag: object) -> EllipsisType:
    return ...


def _complex_of(_tag: object, real: object, imag: object) -> complex:
    return complex(exactly(real, float), exactly(imag, float))


# -- the tables

ENCODERS: dict[type, TypeEncoder] = {
    list: lambda walk, value: walk.children([Tag.LIST], value, value, by_index),
    tuple: lambda walk, value: walk.children([Tag.TUPLE], value, value, by_index),
    dict: _encode_dict,
    set: lambda walk, value: walk.children([Tag.SET], value, value, lambda *_: "{...}"),
    frozenset: lambda walk, value: walk.children([Tag.FROZENSET], value, value, lambda *_: "{...}"),
    Tensor: tensor_node,
    Parameter: tensor_node,
    int: _encode_int,
    str: _encode_str,
    complex: lambda _, value: [Tag.COMPLEX, value.real, value.imag],
    slice: lambda walk, value: _encode_bounds(walk, Tag.SLICE, value),
    range: lambda walk, value: _encode_bounds(walk, Tag.RANGE, value),
    EllipsisType: lambda _, __: [Tag.ELLIPSIS],
    bytearray: lambda _, value: [Tag.BYTEARRAY, bytes(value)],
    OrderedDict: _encode_ordered_dict,
    torch.device: lambda _, value: [Tag.DEVICE, str(value)],
    torch.Generator: _encode_generator,
    torch.Size: lambda _, value: [Tag.SIZE, *value],
    **dict.fromkeys(_CONSTANT_TYPES, lambda _, value: [Tag.TORCH_CONSTANT, str(value)]),
}

DECODERS: dict[int, TypeDecoder] = {
    Tag.LIST: Decoder.children,
    Tag.TUPLE: lambda walk, node: tuple(walk.children(node)),
    Tag.DICT: lambda walk, node: filled({}, walk.children(node)) if len(node) > 1 else {},
    Tag.SET: _decode_set,
    Tag.FROZENSET: lambda walk, node: frozenset(_decode_set(walk, node)),
    Tag.TENSOR: lambda walk, node: walk.tensor(*node[1:]),
    Tag.SAME_TENSOR: lambda walk, node: walk.same_tensor(*node[1:]),
    Tag.BIG_INT: lambda _, node: int.from_bytes(_data_of(node), "little", signed=True),
    Tag.COMPLEX: lambda _, node: _complex_of(*node),
    Tag.SLICE: lambda walk, node: _slice_of(*walk.children(node)),
    Tag.RANGE: lambda walk, node: _range_of(*walk.children(node)),
    Tag.ELLIPSIS: lambda _, node: _ellipsis_of(*node),
    Tag.BYTEARRAY: lambda _, node: bytearray(_data_of(node)),
    Tag.SURROGATES: lambda _, node: _data_of(node).decode("utf-8", "surrogatepass"),
    Tag.ORDERED_DICT: _decode_ordered_dict,
    Tag.TORCH_CONSTANT: _decode_torch_constant,
    Tag.DEVICE: _decode_device,
    Tag.SIZE: _decode_size,
    Tag.GENERATOR: _decode_generator,
}
