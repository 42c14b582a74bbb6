"""The messages of a step, from the maker of an optimizer to its shards.

A step is frequent and small, so it is not a call: no function is looked up, no value is encoded, no
reference is counted.
"""

from __future__ import annotations

from gradwire.ids import ContextId, RefId, StepId
from gradwire.wire.message import Message, Seconds

Scalar = None | bool | int | float | str
PlainOptions = dict[int, dict[str, Scalar | tuple[Scalar, ...]]]
"""The options of each group, by its number."""


class Prepare(Message, frozen=True, tag=0x60):
    """Compute a step. Answered by Agreed: False if another step has the lock, unless we `wait`.

    If the shard is `alone`, no other worker takes part, and the step is committed at once. Options
    that are not plain data were sent by a call before, and `options` is None.
    """

    shard: RefId
    step: StepId
    context: ContextId | None
    options: PlainOptions | None
    seconds: Seconds
    wait: bool
    alone: bool


class Commit(Message, frozen=True, tag=0x61):
    """Put the prepared step in place. Answered by Agreed: False if it was given up before."""

    shard: RefId
    step: StepId
    seconds: Seconds


class Abort(Message, frozen=True, tag=0x62):
    """Drop the prepared step, if there is one. Answered by Agreed."""

    shard: RefId
    step: StepId
    seconds: Seconds


StepMessage = Prepare | Commit | Abort


class Agreed(Message, frozen=True, tag=0x63):
    """Whether the shard has done it."""

    done: bool


_SCALARS = frozenset({type(None), bool, float, str})
_INTEGERS = range(-(1 << 63), 1 << 64)
"""what msgpack can hold"""


def maybe_plain(options: dict[int, dict[str, object]]) -> PlainOptions | None:
    """The options themselves, if a message can hold all of them. hot: every step"""
    for group in options.values():
        for key, value in group.items():
            if type(key) is not str:
                return None
            for each in value if type(value) is tuple else (value,):
                if type(each) not in _SCALARS and (type(each) is not int or each not in _INTEGERS):
                    return None
    return options  # type: ignore[return-value]  # just checked
