"""The walk over a value, down into its containers, and over a skeleton, back up.

A skeleton is made of what msgpack carries unchanged: None, bool, int, float, str and bytes stand
for themselves, and a list is a node, whose first element is the tag of its kind. One walk serves
one value; it knows depth, tensors and names, not what the kinds are.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, Protocol, TypeVar, final

from torch import Tensor

from gradwire.errors import BadMessage, NotExposed, NotSerializable, OverLimit

Node = list[object]
Packer = Callable[["Packing", Any], object]
Unpacker = Callable[["Unpacking", Node], object]
Step = Callable[[Any, int], str]

T = TypeVar("T")

EXPOSE_HINT = "expose it with @gradwire.expose"

AS_THEY_ARE = frozenset({NoneType, bool, float, bytes})
LEAVES = AS_THEY_ARE | {int, str}


class Names(Protocol):
    """By which names functions and classes travel."""

    def name_of(self, obj: Any) -> str:  # noqa: ANN401  (a function or a class)
        """The name of a function or class; raises NotExposed."""

    def lookup(self, name: str) -> object:
        """The function or class of that name; raises NotExposed."""


@final
class Packing:
    """One value on its way into a skeleton and a list of tensors."""

    __slots__ = ("_depth", "_learn", "_left", "_names", "_packers", "copies", "tensors")

    def __init__(
        self,
        packers: Mapping[type, Packer],
        learn: Callable[[type], Packer],
        names: Names,
        depth: int,
    ) -> None:
        self.tensors: list[Tensor] = []
        self.copies = 0
        self._packers, self._learn, self._names = packers, learn, names
        self._depth = self._left = depth

    def node(self, value: object) -> object:
        """The skeleton of one value.

        hot: every argument and result
        """
        kind = type(value)
        if kind in AS_THEY_ARE:
            return value
        packer = self._packers.get(kind)
        if packer is None:
            packer = self._learn(kind)
        return packer(self, value)

    def children(self, node: Node, owner: object, values: Iterable[object], step: Step) -> Node:
        """Add the values inside `owner` to its node; `step` says how the n-th is reached."""
        if not self._left:
            raise NotSerializable(
                f"containers are nested deeper than {self._depth}",
                hint="one that holds itself does not travel; else flatten it or raise Limits.depth",
            )
        self._left -= 1
        first = len(node)
        packers = self._packers
        try:
            for value in values:  # `node` for each, spelt out
                kind = type(value)
                if kind in AS_THEY_ARE:
                    node.append(value)
                else:
                    packer = packers.get(kind) or self._learn(kind)
                    node.append(packer(self, value))
        except NotSerializable as refusal:
            raise refusal.inside(step(owner, len(node) - first)) from None
        self._left += 1
        return node

    def name_of(self, named: object) -> str:
        """The name by which a function or class travels."""
        try:
            return self._names.name_of(named)
        except NotExposed as refusal:
            hint = refusal.hint or EXPOSE_HINT
            raise NotSerializable(refusal.message, hint=hint) from None


@final
class Unpacking:
    """One skeleton on its way back; whatever does not fit is the peer's fault."""

    __slots__ = ("_due", "_left", "_names", "_tensors", "_unpackers")

    def __init__(
        self,
        unpackers: Mapping[int, Unpacker],
        names: Names,
        depth: int,
        tensors: Sequence[Tensor],
    ) -> None:
        self._unpackers, self._names, self._tensors = unpackers, names, tensors
        self._left = depth
        self._due = 0

    def value(self, node: object) -> object:
        """The value behind one node.

        hot: every argument and result
        """
        if type(node) is not list:
            if type(node) in LEAVES:
                return node
            raise BadMessage(f"a packed value holds a bare {type(node).__name__}")
        tag = node[0] if node else None
        unpacker = self._unpackers.get(tag) if type(tag) is int else None
        if unpacker is None:
            raise BadMessage(f"a packed value has the unknown tag {reprlib.repr(tag)}")
        return unpacker(self, node)

    def children(self, node: Node, first: int = 1) -> list[object]:
        """The values inside a node, from its element `first` on."""
        if not self._left:
            raise OverLimit("a packed value is nested deeper than the limit")
        self._left -= 1
        value = self.value
        values = [child if type(child) in LEAVES else value(child) for child in node[first:]]
        self._left += 1
        return values

    def tensor(self, index: object) -> Tensor:
        """The next tensor. They are packed in the order of the walk, so its number is known."""
        if index != self._due or self._due == len(self._tensors):
            raise BadMessage(
                f"a packed value names tensor {reprlib.repr(index)} where {self._due} "
                f"of {len(self._tensors)} was due"
            )
        self._due += 1
        return self._tensors[self._due - 1]

    def lookup(self, name: object) -> object:
        """The function or class of that name; raises NotExposed."""
        return self._names.lookup(exactly(name, str))

    def done(self) -> None:
        """The walk is over: every tensor must have been met."""
        if self._due != len(self._tensors):
            unused = len(self._tensors) - self._due
            raise BadMessage(f"{unused} of {len(self._tensors)} tensors belong to no value")


def exactly(value: object, kind: type[T]) -> T:
    """The value a peer sent, if it is of that very type."""
    if type(value) is not kind:
        shown = reprlib.repr(value)
        raise BadMessage(f"a packed value holds {shown} where a {kind.__name__} was due")
    return value


def spoken(kind: type) -> str:
    """The full name of a type, for messages."""
    # A spawned process knows its script as __mp_main__, which no user has written anywhere.
    home = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{home}.{kind.__qualname__}"
