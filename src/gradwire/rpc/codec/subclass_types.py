"""Encodes instances of subclasses of builtin types and of Tensor, if their class is exposed.

One is sent as the name of its class, what it is as its base, and its attributes. It is made by the
base's `__new__` and filled by the base's methods, so no code of the class runs, and attributes that
a peer sends shadow no method. A Tensor arrives by `as_subclass`, as part of the graph; one that
only wraps others (`__torch_dispatch__`) has no memory to send.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from itertools import chain
from types import MemberDescriptorType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.errors import BadMessage, NotSerializable
from gradwire.rpc.codec.builtin_types import by_index, by_key, filled, tensor_node
from gradwire.rpc.codec.named_types import attributes_of
from gradwire.rpc.codec.walk import Decoder, Encoder, Node, Step, Tag, TypeEncoder, exactly

_IS_HEAP_TYPE = 1 << 9
_ABSENT = object()
_BASES: tuple[type, ...] = (dict, list, tuple, str)
Fill = Callable[[type, list[object]], object]


def maybe_encoder(kind: type) -> TypeEncoder | None:
    """The encoder of a subclass, if its instances can cross."""
    if _base_of(kind) is None:
        return None
    return _encode_tensor if issubclass(kind, Tensor) else _encode


def _base_of(kind: type) -> type | None:
    """The builtin type or Tensor that this is a subclass of; None if it cannot cross as such."""
    if kind.__module__.partition(".")[0] == "torch":
        return None
    if issubclass(kind, Tensor):
        is_wrapper = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
        return None if is_wrapper or issubclass(kind, Parameter) else Tensor
    nearest = next(base for base in kind.__mro__ if not base.__flags__ & _IS_HEAP_TYPE)
    return nearest if nearest in _BASES and kind is not nearest else None


def _encode(walk: Encoder, value: Any) -> object:  # noqa: ANN401
    kind, base = type(value), _base_of(type(value))
    node: Node = [Tag.SUBCLASS, _name_of(walk, kind)]
    step: Step = by_index
    if base is str:
        parts = [str.__str__(value)]
    elif base is dict:
        parts, step = list(chain.from_iterable(dict.items(value))), by_key
    else:
        parts = list(base.__iter__(value))  # type: ignore[union-attr]
    inner = walk.children([Tag.LIST], value, parts, step)
    return walk.children([*node, inner], value, (_held(value),), lambda *_: ".__dict__")


def _encode_tensor(walk: Encoder, value: Tensor) -> object:
    node: Node = [Tag.SUBCLASS, _name_of(walk, type(value))]
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        plain = value.as_subclass(Tensor)
    node.append(tensor_node(walk, plain))
    return walk.children(node, value, (_held(value),), lambda *_: ".__dict__")


def _name_of(walk: Encoder, kind: type) -> str:
    try:
        return walk.name_of(kind)
    except NotSerializable as refusal:
        base = cast(type, _base_of(kind)).__name__
        hint = f"{refusal.hint}; or send it as a plain {base}"
        raise NotSerializable(refusal.message, hint=hint) from None


def _held(value: object) -> dict[str, object]:
    kind = type(value)
    held = {name: getattr_static(value, name) for name in attributes_of(value)}
    for name in held:
        found = getattr_static(kind, name, _ABSENT)
        if isinstance(found, MemberDescriptorType):
            held[name] = getattr(value, name)
        elif not _may_set(kind, name):
            raise NotSerializable(
                f"a {kind.__name__} with the attribute {name!r:.80}, which is a method or property "
                "of its class, cannot be serialized",
                hint="give the attribute another name",
            )
    return held


def _may_set(kind: type, name: str) -> bool:
    """Whether an attribute of that name hides no method and no property."""
    found = getattr_static(kind, name, _ABSENT)
    if isinstance(found, MemberDescriptorType):
        return True
    is_special = name.startswith("__") or not name.isidentifier()
    return not (is_special or callable(found) or hasattr(type(found), "__get__"))


def decode_subclass(walk: Decoder, node: Node) -> object:
    """The instance of a node."""
    _, name, _, _ = node
    kind = walk.lookup(name)
    if not isinstance(kind, type) or (base := _base_of(kind)) is None:
        raise BadMessage(f"{name} is no subclass here that can cross")
    inner, held = walk.children(node, 2)
    if base is Tensor:
        if not isinstance(inner, Tensor):
            raise BadMessage(f"an encoded {name} holds a {type(inner).__name__}")
        with torch.enable_grad():
            value: Any = inner.as_subclass(kind)
    else:
        value = _FILL[base](kind, exactly(inner, list))
    for key, attribute in exactly(held, dict).items():
        if not _may_set(kind, exactly(key, str)):
            raise BadMessage(f"an encoded {name} has the attribute {key!r:.80}")
        slot = getattr_static(kind, key, _ABSENT)
        if isinstance(slot, MemberDescriptorType):
            slot.__set__(value, attribute)
        else:
            object.__getattribute__(value, "__dict__")[key] = attribute
    return value


def _dict_of(kind: Any, flat: list[object]) -> object:  # noqa: ANN401
    value = dict.__new__(kind)
    dict.update(value, filled({}, flat))
    return value


def _list_of(kind: Any, items: list[object]) -> object:  # noqa: ANN401
    value = list.__new__(kind)
    list.extend(value, items)
    return value


def _str_of(kind: Any, parts: list[object]) -> object:  # noqa: ANN401
    (text,) = parts
    return str.__new__(kind, exactly(text, str))


_FILL: dict[type, Fill] = {
    dict: _dict_of,
    list: _list_of,
    tuple: tuple.__new__,  # type: ignore[dict-item]
    str: _str_of,
}
