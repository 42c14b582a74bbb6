"""Ordinary values without the walk: plain ones and tensors, alone or side by side in a tuple.

The skeletons are those of the walk (walk.py). What holds anything else, or does not fit, is left to
it: the walk alone looks into containers, and judges what a peer sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor
from torch.nn import Parameter

from gradwire.rpc.codec.walk import AS_THEY_ARE, LEAVES, Node, Tag

DICT, TENSOR, TUPLE = Tag.DICT, Tag.TENSOR, Tag.TUPLE
DEPTH: Final = 2
"""how deep such a value is nested at most"""
WALK: Final = object()
"""in place of a value: the walk has to go there"""


def maybe_node(value: object, tensors: list[Tensor]) -> object:
    """The skeleton of a value, whose tensors are added to these; or WALK.

    hot: every argument list and result
    """
    is_call = False
    if type(value) is not tuple:
        values: tuple[object, ...] = (value,)
    elif len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict and not value[1]:
        is_call, values = True, value[0]  # its arguments, all of them positional
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
    """The value of a skeleton that holds all of these tensors; or WALK.

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
    due = 0
    for node in row[1:]:
        if type(node) in LEAVES:
            values.append(node)
        elif type(node) is list and len(node) == 2 and type(node[0]) is int and node[0] == TENSOR:
            if node[1] != due or due == len(tensors):
                return None
            values.append(tensors[due])
            due += 1
        else:
            return None
    return values if due == len(tensors) else None
