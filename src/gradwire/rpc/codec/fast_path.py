"""Encodes common values without a walk: scalars and tensors, alone or in a tuple.

The skeletons are the same as those of walk.py. Any other value, and any skeleton that does not fit,
is left to the walk: only the walk looks into containers and raises errors about what a peer sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor
from torch.nn import Parameter

from gradwire.rpc.codec.walk import AS_THEY_ARE, LEAVES, Node, Tag

DICT, TENSOR, TUPLE = Tag.DICT, Tag.TENSOR, Tag.TUPLE
DEPTH: Final = 2
"""how deep such a value is nested at most: a call is a tuple of arguments in a tuple"""
WALK: Final = object()
"""returned in place of a value that needs a walk"""


def maybe_node(value: object, tensors: list[Tensor]) -> object:
    """The skeleton of a value, or WALK; appends its tensors to `tensors`.

    hot: every argument list and result
    """
    is_call = False
    if type(value) is not tuple:
        values: tuple[object, ...] = (value,)
    elif len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict and not value[1]:
        is_call, values = True, value[0]  # a call's arguments, without keywords
    else:
        values = value
    row: Node = [TUPLE]
    for one in values:
        kind = type(one)
        if kind in AS_THEY_ARE:
            row.append(one)
        elif kind is Tensor or kind is Parameter:
            row.append([TENSOR, len(tensors)])
            tensors.append(one)  # type: ignore[arg-type]
        elif (
            kind is int and -(1 << 63) <= one < 1 << 64  # type: ignore[operator]
        ) or (
            kind is str and one.isascii()  # type: ignore[attr-defined]
        ):
            row.append(one)
        else:
            return WALK
    if is_call:
        return [TUPLE, row, [DICT]]
    return row if values is value else row[1]


def maybe_value(node: object, tensors: Sequence[Tensor]) -> object:
    """The value of a skeleton that uses all of these tensors, or WALK.

    hot: every argument list and result
    """
    if type(node) is not list or not node or type(node[0]) is not int:
        return node if type(node) in LEAVES and not tensors else WALK
    if node[0] == TENSOR:
        values = _maybe_values([TUPLE, node], tensors)
        return WALK if values is None else values[0]
    if node[0] != TUPLE:
        return WALK
    if len(node) == 3 and type(node[2]) is list and len(node[2]) == 1:
        row, (tag,) = node[1:]
        is_call = type(row) is list and row and type(row[0]) is int and row[0] == TUPLE
        if not is_call or type(tag) is not int or tag != DICT:
            return WALK
        values = _maybe_values(row, tensors)
        return WALK if values is None else (tuple(values), {})
    values = _maybe_values(node, tensors)
    return WALK if values is None else tuple(values)


def _maybe_values(row: Node, tensors: Sequence[Tensor]) -> list[object] | None:
    values: list[object] = []
    used = 0
    for node in row[1:]:
        if type(node) in LEAVES:
            values.append(node)
        elif type(node) is list and len(node) == 2 and type(node[0]) is int and node[0] == TENSOR:
            if node[1] != used or used == len(tensors):
                return None
            values.append(tensors[used])
            used += 1
        else:
            return None
    return values if used == len(tensors) else None
