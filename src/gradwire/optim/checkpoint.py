"""What training goes on from, on any workers: values of parameters and state of their optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradwire.errors import UsageError
from gradwire.optim.clip import by_owner
from gradwire.rpc.api import rpc_async
from gradwire.rpc.expose.registry import expose
from gradwire.rpc.rref import RRef

Ref = RRef[torch.Tensor]
PARAMETERS = "parameters"


@expose
def values_of(refs: list[Ref]) -> list[torch.Tensor]:
    """Copies of parameters of this worker."""
    return [ref.local_value().detach().clone() for ref in refs]


@expose
def set_values(refs: list[Ref], values: list[torch.Tensor]) -> None:
    """Write to parameters of this worker."""
    with torch.no_grad():
        for ref, value in zip(refs, values, strict=True):
            ref.local_value().copy_(value)


def fetched(refs: Sequence[Ref]) -> list[torch.Tensor]:
    """The values of all of them, in order; their owners are asked at the same time."""
    with torch.no_grad():
        asked = [
            (places, rpc_async(owner, values_of, args=([refs[n] for n in places],)))
            for owner, places in by_owner(refs).items()
        ]
        found = {
            n: value
            for places, future in asked
            for n, value in zip(places, future.wait(), strict=True)
        }
    return [found[n] for n in range(len(refs))]


def written(refs: Sequence[Ref], saved: dict[str, Any]) -> None:
    """Give all of them the values that a checkpoint holds."""
    values = saved.get(PARAMETERS)
    if values is None:
        raise UsageError(
            "this is no checkpoint: it has no values of parameters",
            hint="checkpoint() makes one; what state_dict() gives is for load_state_dict()",
        )
    if len(values) != len(refs):
        raise ValueError(f"the checkpoint has {len(values)} parameters, this optimizer {len(refs)}")
    with torch.no_grad():
        asked = [
            rpc_async(owner, set_values, args=([refs[n] for n in at], [values[n] for n in at]))
            for owner, at in by_owner(refs).items()
        ]
        for future in asked:
            future.wait()
