"""In one process, a generator for each worker, as real workers have.

The default generator of the process is that of the worker which runs: entering another one swaps
its state. A checkpoint in one process repeats what all of them draw.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

T = TypeVar("T")

OWN: dict[str, torch.Generator] = {}
"""Of the workers of a cluster in this process; in a process of its own, a worker has torch's."""


def owned(workers: int) -> list[torch.Generator]:
    """Generators for the workers of a cluster in this process."""
    made = [torch.Generator() for _ in range(workers)]
    OWN.update({f"w{n}": generator for n, generator in enumerate(made)})
    return made


def seed(worker: str, number: int) -> None:
    OWN.get(worker, torch.default_generator).manual_seed(number)


@dataclass
class _Dice:
    on: bool = False
    current: str = ""
    aside: dict[str, torch.Tensor] = field(default_factory=dict)
    """the states of the others"""

    def turn_to(self, worker: str) -> None:
        if worker != self.current:
            self.aside[self.current] = torch.get_rng_state()
            self.current = worker
            torch.set_rng_state(self.aside.pop(worker))

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.aside, self.current: torch.get_rng_state()}

    def put(self, states: dict[str, torch.Tensor]) -> None:
        self.aside = dict(states)
        torch.set_rng_state(self.aside.pop(self.current))


_dice = _Dice()


@contextmanager
def cast(workers: list[str]) -> Iterator[None]:
    """Each of these has a generator; the first one runs."""
    before, _dice.on = torch.get_rng_state(), True
    _dice.current, *others = workers
    _dice.aside = dict.fromkeys(others, before)
    try:
        yield
    finally:
        _dice.on = False
        torch.set_rng_state(before)


@contextmanager
def of(worker: str) -> Iterator[None]:
    """What is drawn inside comes from the generator of this worker, if it has one."""
    if not _dice.on:
        yield
        return
    before = _dice.current
    _dice.turn_to(worker)
    try:
        yield
    finally:
        _dice.turn_to(before)


def repeated(function: Callable[..., T]) -> Callable[..., T]:
    """Every time it runs, it draws what it drew the first time, on any worker."""
    first: list[dict[str, torch.Tensor]] = []

    @functools.wraps(function)
    def run(*args: object) -> T:
        if not first:
            first.append(_dice.all())
            return function(*args)
        now = _dice.all()
        _dice.put(first[0])
        try:
            return function(*args)
        finally:
            _dice.put(now)

    return run
