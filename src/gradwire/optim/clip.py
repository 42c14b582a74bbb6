"""clip_grad_norm_: clips gradients by their norm over all workers.

Each owner returns the norms of its gradients. The caller takes the norm of these, in the order of
the parameters as one process would, and sends all owners the factor to scale by, if any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gradwire.errors import UsageError
from gradwire.ids import ContextId, WorkerId
from gradwire.optim.shard import MaybeTensors, optimizer_host, parameter_of
from gradwire.rpc.api import rpc_async
from gradwire.rpc.expose.registry import expose
from gradwire.rpc.rref import RRef

Ref = RRef[torch.Tensor]


@expose
def norms_here(refs: list[Ref], norm_type: float, context: ContextId | None) -> MaybeTensors:
    """The norm of each parameter's gradient; None for those without one."""
    return optimizer_host().norms(map(parameter_of, refs), norm_type, context)


@expose
def scale_here(refs: list[Ref], coefficient: torch.Tensor, context: ContextId | None) -> None:
    """Scale the gradients of these parameters in place."""
    optimizer_host().scale(map(parameter_of, refs), coefficient, context)


def clip_grad_norm_(
    parameters: Iterable[Ref],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    context_id: ContextId | None = None,
) -> torch.Tensor:
    """Clip the gradients of parameters on any workers; returns their total norm before that.

    Like `torch.nn.utils.clip_grad_norm_`, and equal to it bit for bit. `parameters` are references.
    With a `context_id` it clips the gradients of `backward(context_id, …)`, else those in `.grad`.
    """
    refs = list(parameters)
    check_references(refs)
    norms = ask_owners(refs, norms_here, norm_type, context_id)
    total, coefficient = norm_and_scale(norms, max_norm, norm_type, error_if_nonfinite)
    if coefficient is not None:
        ask_owners(refs, scale_here, coefficient, context_id)
    return total


@torch.no_grad()
def norm_and_scale(
    norms: MaybeTensors, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The total norm, and the factor to scale by; None if that is 1."""
    found = [norm for norm in norms if norm is not None]
    total = torch.tensor(0.0)
    if found:
        stacked = torch.stack([norm.to(found[0].device) for norm in found])
        total = torch.linalg.vector_norm(stacked, norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise UsageError(
            f"the total norm of order {norm_type} of the gradients is non-finite: {total}",
            hint="error_if_nonfinite=False scales them by it anyway",
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    return total, None if coefficient == 1.0 else coefficient


def ask_owners(
    refs: Sequence[Ref],
    function: Callable[..., list[Any] | None],
    *args: object,
    values: Sequence[object] | None = None,
) -> list[Any]:
    """Call a function on all owners at once, with their references and the `values` of these.

    Returns what it returned for each reference, in their order.
    """
    shares, asked = by_owner(refs), []
    answers: dict[int, Any] = {}
    with torch.no_grad():
        for owner, share in shares.items():
            own = () if values is None else ([values[n] for n in share],)
            asked.append(rpc_async(owner, function, args=([refs[n] for n in share], *own, *args)))
        for share, future in zip(shares.values(), asked, strict=True):
            answer = future.wait()
            if answer is not None:
                answers |= zip(share, answer, strict=True)
    return [answers.get(n) for n in range(len(refs))]


def by_owner(refs: Iterable[Ref]) -> dict[WorkerId, list[int]]:
    """The indices of each owner's references, in the order of the owners' ids."""
    shares: dict[WorkerId, list[int]] = {}
    for n, ref in enumerate(refs):
        shares.setdefault(ref.owner().id, []).append(n)
    return dict(sorted(shares.items()))


def check_references(refs: Iterable[object]) -> None:
    """Check that all of them are references."""
    for n, ref in enumerate(refs):
        if not isinstance(ref, RRef):
            raise UsageError(
                f"parameter {n} is a {type(ref).__name__}, not a reference",
                hint="pass RRefs, as in [RRef(p) for p in module.parameters()] on their owner",
            )
