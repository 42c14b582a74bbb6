"""Encodes torch's distributions and transforms by their attributes.

A constructor would compute on its arguments again (Categorical divides probabilities by their sum),
so values and gradients would not be those of the object that was sent. Only classes of torch that
are in the table are made, only of the types below, and no attribute of a peer hides a method.
"""

from __future__ import annotations

from itertools import chain
from types import NoneType
from typing import Any

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution, Transform

from gradwire.errors import BadMessage, NotSerializable
from gradwire.rpc.codec.builtin_types import by_key, filled
from gradwire.rpc.codec.walk import Decoder, Encoder, Node, Tag, TypeEncoder, exactly

_PARTS = (Tensor, bool, int, float, NoneType, torch.Size, Distribution, Transform)
_CACHE: dict[str, object] = {"_inv": None, "_cached_x_y": (None, None)}
"""what a transform remembers of its last use, which is not sent"""


def _kinds() -> dict[str, type]:
    homes = [home for home in vars(distributions).values() if type(home) is type(torch)]
    found = {kind for home in homes for kind in vars(home).values() if isinstance(kind, type)}
    return {
        kind.__name__: kind
        for kind in sorted(found, key=lambda kind: kind.__name__)
        if issubclass(kind, Distribution | Transform)
        and kind.__module__.startswith("torch.distributions.")
        and kind.__name__ != "_InverseTransform"  # it and its inverse hold each other
    }


_KINDS = _kinds()


def maybe_encoder(kind: type) -> TypeEncoder | None:
    """The encoder of a distribution or a transform of torch."""
    return _encode if _KINDS.get(kind.__name__) is kind else None


def _encode(walk: Encoder, value: object) -> object:
    kind = type(value)
    held = {name: each for name, each in vars(value).items() if name not in _CACHE}
    for name, each in held.items():
        if not _may_hold(kind, name, each):
            raise NotSerializable(
                f"a {kind.__name__} that holds a {type(each).__name__} cannot be serialized",
                place=f".{name}",
                hint="send its parameters, and make it there",
            )
    node: Node = [Tag.DISTRIBUTION, kind.__name__]
    return walk.children(node, held, chain.from_iterable(held.items()), by_key)


def decode_distribution(walk: Decoder, node: Node) -> object:
    """The distribution or transform of a node."""
    kind = _KINDS.get(exactly(node[1], str))
    if kind is None:
        raise BadMessage(f"torch {torch.__version__} has no distribution {node[1]!r:.80}")
    held: dict[Any, Any] = filled({}, walk.children(node, 2))
    for name, each in held.items():
        if name in _CACHE or not _may_hold(kind, exactly(name, str), each):
            raise BadMessage(f"an encoded {kind.__name__} has the attribute {name!r:.80}")
    value: Any = object.__new__(kind)
    if issubclass(kind, Transform):
        held |= _CACHE
    vars(value).update(held)
    return value


def _may_hold(kind: type, name: str, value: object) -> bool:
    """Whether an object may have this attribute: it hides no method, and is of a known type."""
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    is_special = name.startswith("__") or not name.isidentifier()
    if is_special or callable(found) or isinstance(found, property):
        return False
    if type(value) in (list, tuple):
        return all(isinstance(each, _PARTS) for each in value)  # type: ignore[attr-defined]
    return isinstance(value, _PARTS)
