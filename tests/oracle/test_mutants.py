"""Faults of the core that random programs must find: each is made here, and played until found."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from gradwire import Options, Timeouts
from gradwire.autograd.backward import engine_run
from gradwire.autograd.engine import Engine
from gradwire.autograd.graph import crossing
from gradwire.autograd.graph.edges import Edges
from gradwire.autograd.graph.release import Releases
from tests import strength
from tests.oracle import leaks
from tests.oracle.check import Checker, workers

OPTIONS = Options(timeouts=Timeouts(call=20, backward=2))
KINDS = ["threads", "acts", "contexts", "unread"]
Mutate = Callable[[pytest.MonkeyPatch], None]


def no_links(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(crossing, "_links", lambda edges, mine: [])


def strong_table(patch: pytest.MonkeyPatch) -> None:
    arrived = Edges.arrived
    alive: list[object] = []

    def keep(self: Edges, end: object, node: object, *more: object) -> None:
        alive.append(node)
        arrived(self, end, node, *more)

    patch.setattr(Edges, "arrived", keep)


def no_withdraw(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "withdraw", lambda self, crossings: None)


def joins_for_ever(patch: pytest.MonkeyPatch) -> None:
    dropped = Edges._dropped

    def keep(self: Edges, numbers: Iterable[int]) -> list:
        joins = self.joins
        found = dropped(self, numbers)
        self.joins = joins
        return found

    patch.setattr(Edges, "_dropped", keep)


def early_release(patch: pytest.MonkeyPatch) -> None:
    """Some edges are dropped as soon as the next one leaves."""
    next_edge = Edges.next_edge

    def forget(self: Edges) -> object:
        edge = next_edge(self)
        if edge.n % 7 == 0:
            self.sent.pop(edge.n - 1, None)
        return edge

    patch.setattr(Edges, "next_edge", forget)


def loss_side_not_lifted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_run, "lift", lambda node, depth: False)


def never_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Releases, "heard", lambda self, edges, by: None)


MUTANTS: dict[Mutate, int] = {
    no_links: 40,
    strong_table: 10,
    no_withdraw: 60,
    joins_for_ever: 60,
    early_release: 40,
    never_released: 10,
    loss_side_not_lifted: 100,
}
"""the programs within which it must be found: several times as many as it takes"""


@pytest.mark.slow
@pytest.mark.parametrize("mutate", strength.part_of(MUTANTS, 4), ids=lambda mutate: mutate.__name__)
def test_a_fault_is_found(mutate, monkeypatch):
    monkeypatch.setattr(leaks, "SECONDS", 3.0)
    mutate(monkeypatch)
    with workers(OPTIONS, draws=False) as on_w0:
        checker = Checker(on_w0, kinds=KINDS)
        found = (checker.failure(seed) for seed in range(MUTANTS[mutate]))

        assert next((failure for failure in found if failure), None) is not None
