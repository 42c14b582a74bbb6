"""Compares the two worlds, bit by bit."""

from __future__ import annotations

import torch

from tests.oracle.outcome import Outcome
from tests.oracle.programs import Program

EXACT = 2.0**52
"""Below this, integers in float64 add up to the same in any order."""


def difference(program: Program, remote: Outcome, local: Outcome) -> str | None:
    """What is not equal, in words; None if everything is."""
    if remote.error != local.error:
        return f"error {remote.error!r}, in one process {local.error!r}"
    if len(remote.values) != len(local.values):
        return f"{len(remote.values)} values, in one process {len(local.values)}"
    for n, (got, want) in enumerate(zip(remote.values, local.values, strict=True)):
        if not torch.equal(got, want):
            return f"value {n} is {got}, in one process {want}"
    if local.error is not None:
        return None  # how far a failed backward came is not promised
    for n, (got, want) in enumerate(zip(remote.gradients, local.gradients, strict=True)):
        of = "x" if n == 0 else f"the parameter of w{n - 1}"
        if (got is None) != (want is None):
            return f"the gradient of {of} is {got}, in one process {want}"
        if got is not None and not torch.equal(got, want):
            return f"the gradient of {of} is {got}, in one process {want}"
    for n, (got, want) in enumerate(zip(remote.counts, local.counts, strict=True)):
        if got != want:
            return f"on w{n} ran {dict(got)}, in one process {dict(want)}"
    return None
