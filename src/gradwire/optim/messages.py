"""What the maker of an optimizer says to its shards, step after step.

A step is asked for often and says little, so it is no call: no function is looked up, nothing is
packed, no reference is counted.
"""

from __future__ import annotations

from gradwire.ids import ContextId, RefId
from gradwire.optim.parameter_locks import StepId
from gradwire.wire.message import Message, Seconds

Scalar = None | bool | int | float | str
PlainOptions = dict[int, dict[str, Scalar | tuple[Scalar, ...]]]
"""The options of each group, by its number."""


class Prepare(Message, frozen=True, tag=0x60):
    """Compute a step aside. Answered by Agreed: False if others step and we are not to `wait`.

    If the shard is `alone` there is nobody to agree with, and the step is put in place at once.
    Without `options` it has those that came before, in a call: there are some that are not plain.
    """

    shard: RefId
    step: StepId
    context: ContextId | None
    options: PlainOptions | None
    seconds: Seconds
    wait: bool
    alone: bool


class Commit(Message, frozen=True, tag=0x61):
    """Put in place what was prepared. Answered by Agreed: False if it was given up before."""

    shard: RefId
    step: StepId
    seconds: Seconds


class Abort(Message, frozen=True, tag=0x62):
    """Drop what was prepared, if anything was. Answered by Agreed."""

    shard: RefId
    step: StepId
    seconds: Seconds


class Agreed(Message, frozen=True, tag=0x63):
    """Whether a shard has done what it was asked."""

    done: bool


_SCALARS = frozenset({type(None), bool, float, str})
_INTEGERS = range(-(1 << 63), 1 << 64)
"""what msgpack can hold"""


def maybe_plain(options: dict[int, dict[str, object]]) -> PlainOptions | None:
    """The same options, if all of them are data that a message holds as it is.

    hot: asked before each step
    """
    for group in options.values():
        for key, value in group.items():
            if type(key) is not str:
                return None
            kind = type(value)
            if kind in _SCALARS or (kind is int and value in _INTEGERS):
                continue
            if kind is not tuple or not all(map(_is_scalar, value)):  # type: ignore[call-overload]
                return None
    return options  # type: ignore[return-value]  # just checked


def _is_scalar(value: object) -> bool:
    kind = type(value)
    return kind in _SCALARS or (kind is int and value in _INTEGERS)
