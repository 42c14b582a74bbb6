"""Saves and loads the values of parameters and the state of their optimizer, over all workers.

The state has two forms: gathered, which is torch's own, and by owner.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradwire.errors import UsageError
from gradwire.optim.clip import ask_owners
from gradwire.rpc.expose.registry import expose
from gradwire.rpc.rref import RRef

Ref = RRef[torch.Tensor]
PARAMETERS = "parameters"
State = dict[int, Any]
Groups = list[dict[str, Any]]


@expose
def values_of(refs: list[Ref]) -> list[torch.Tensor]:
    """Copies of the values of parameters of this worker."""
    return [ref.local_value().detach().clone() for ref in refs]


@expose
def set_values(refs: list[Ref], values: list[torch.Tensor]) -> None:
    """Set the values of parameters of this worker."""
    with torch.no_grad():
        for ref, value in zip(refs, values, strict=True):
            ref.local_value().copy_(value)


def write_values(refs: Sequence[Ref], saved: dict[str, Any]) -> None:
    """Give all parameters the values in a checkpoint."""
    values = saved.get(PARAMETERS)
    if values is None:
        raise UsageError(
            "this is not a checkpoint: it has no values of parameters",
            hint="checkpoint() makes one; load what state_dict() returns with load_state_dict()",
        )
    if len(values) != len(refs):
        raise ValueError(f"the checkpoint has {len(values)} parameters, this optimizer {len(refs)}")
    ask_owners(refs, set_values, values=values)


def numbered_groups(groups: Groups) -> Groups:
    """The groups with each parameter replaced by its number over all workers."""
    packed, n = [], 0
    for group in groups:
        count = len(group["params"])
        packed.append(copy.deepcopy({**group, "params": list(range(n, n + count))}))
        n += count
    return packed


def gathered(parts: Iterable[State], groups: Groups) -> dict[str, Any]:
    """A state dict with the state of all owners together."""
    state: State = {}
    for part in parts:
        state |= part
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def split_state_dict(saved: dict[str, Any], groups: Groups) -> tuple[State, Groups]:
    """The state by number and the options of each group in a state dict; checks that it fits."""
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
