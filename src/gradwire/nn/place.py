"""Where a module lives: "worker/device"."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gradwire.errors import UsageError

_HINT = 'write "w1/cuda:0", or "w1" for its CPU, or "rank:1/cuda:0" for the worker of that number'


class Place(NamedTuple):
    """A worker, by its name or number, and a device of it."""

    worker: str | int
    device: str


def parse_place(text: str) -> Place:
    """The place that a string names. Whether there is such a worker is for the caller to find."""
    if not isinstance(text, str):
        raise UsageError(f"a {type(text).__name__} names no place for a module", hint=_HINT)
    worker, slash, device = text.partition("/")
    if not worker or "/" in device or (slash and not device):
        raise UsageError(f"{text!r} is not <worker>/<device>", hint=_HINT)
    return Place(_worker(worker, text), _device(device or "cpu", text))


def _worker(name: str, text: str) -> str | int:
    rank = name.removeprefix("rank:")
    if rank == name:
        return name
    if not (rank.isascii() and rank.isdecimal()):
        raise UsageError(f"{text!r}: {rank!r} is no number of a worker", hint=_HINT)
    return int(rank)


def _device(name: str, text: str) -> str:
    try:
        return str(torch.device(name))
    except RuntimeError as error:
        raise UsageError(f"{text!r}: torch knows no device {name!r}", hint=_HINT) from error
