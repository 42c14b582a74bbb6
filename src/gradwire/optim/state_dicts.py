"""The two forms of a saved optimizer: gathered, as torch's own, and by owner. Data in, data out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

State = dict[int, Any]
Groups = list[dict[str, Any]]


def packed_groups(groups: Groups) -> Groups:
    """The groups with numbers in the place of parameters: their order over all workers."""
    packed, n = [], 0
    for group in groups:
        count = len(group["params"])
        packed.append(copy.deepcopy({**group, "params": list(range(n, n + count))}))
        n += count
    return packed


def gathered(parts: Iterable[State], groups: Groups) -> dict[str, Any]:
    """One state of all."""
    state: State = {}
    for part in parts:
        state |= part
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def sharded(parts: Mapping[str, State], groups: Groups) -> dict[str, Any]:
    """The state of each owner by itself."""
    return {"shards": dict(parts), "param_groups": groups}


def unpacked(saved: dict[str, Any], groups: Groups) -> tuple[State, Groups]:
    """The state by number, and the options of each group, of a state that fits these groups."""
    theirs = saved["param_groups"]
    if len(theirs) != len(groups):
        raise ValueError(
            f"loaded state dict has {len(theirs)} parameter groups, this optimizer {len(groups)}"
        )
    for n, (their, mine) in enumerate(zip(theirs, groups, strict=True)):
        if len(their["params"]) != len(mine["params"]):
            raise ValueError(
                f"parameter group {n} of the loaded state dict has {len(their['params'])} "
                f"parameters, that of this optimizer {len(mine['params'])}"
            )
    whole = gathered(saved["shards"].values(), theirs) if "shards" in saved else saved
    numbers = [n for group in theirs for n in group["params"]]
    place = {number: n for n, number in enumerate(numbers)}
    state = {place[number]: value for number, value in whole["state"].items()}
    options = [{key: group[key] for key in group if key != "params"} for group in theirs]
    return state, copy.deepcopy(options)
