"""Compares the two worlds, bit by bit."""

from __future__ import annotations

import torch

from tests.oracle.outcome import Outcome

EXACT = 2.0**52
"""Below this, integers in float64 add up to the same in any order."""


EITHER_FIRST = {"second time", "torch.utils.checkpoint is incompatible with .grad()"}
"""A pass that is refused for both reasons raises the one that it meets first. Which that is depends
on the order of independent nodes, which nobody promises; and a participant looks for checkpoints
before its run begins."""


def difference(remote: list[Outcome], local: list[Outcome]) -> str | None:
    """What is not equal, in words; None if everything is."""
    for n, (a, b) in enumerate(zip(remote, local, strict=False)):
        found = _of_act(a, b)
        if found is not None:
            return found if len(local) == 1 else f"in act {n}: {found}"
    assert len(remote) == len(local), "an act without an error was the last"
    return None


def _of_act(remote: Outcome, local: Outcome) -> str | None:
    if remote.error != local.error and {remote.error, local.error} != EITHER_FIRST:
        return f"error {remote.error!r}, in one process {local.error!r}"
    if len(remote.values) != len(local.values):
        return f"{len(remote.values)} values, in one process {len(local.values)}"
    names = [f"value {n}" for n in range(len(local.values))]
    found = _first_unequal(names, remote.values, local.values)
    if found is not None or local.error is not None:
        return found  # how far a failed backward came is not promised
    names = ["the gradient of x"]
    names += [f"the gradient of w{n}'s parameter" for n in range(len(local.counts))]
    found = _first_unequal(names, remote.gradients, local.gradients)
    return found or _first_unequal_count(remote.counts, local.counts)


def _first_unequal(names: list[str], got: list, want: list) -> str | None:
    for name, a, b in zip(names, got, want, strict=True):
        if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
            return f"{name} is {a}, in one process {b}"
    return None


def _first_unequal_count(got: list, want: list) -> str | None:
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            return f"on w{n} ran {dict(a)}, in one process {dict(b)}"
    return None
