"""Statuses as workers would answer them, for tests of what is made of them."""

from __future__ import annotations

from gradwire.seeing.status import PassNow, PeerTraffic, Served, Status, Totals, Unanswered


def status(
    worker: str,
    *requests: Unanswered,
    serves: tuple[Served, ...] = (),
    passes: tuple[PassNow, ...] = (),
    traffic: tuple[PeerTraffic, ...] = (),
    totals: Totals | None = None,
    has_program: bool = False,
    pid: int = 7,
) -> Status:
    totals = totals or Totals()
    lists = [*requests], [*serves], [*passes], [], [*traffic]
    return Status(worker, 0, pid, has_program, 3, 1 << 20, totals, *lists)


def request(
    peer: str,
    n: int = 1,
    what: str = "f",
    age: float = 2.0,
    left: float = 58.0,
    made_for: tuple[str, int] | None = None,
) -> Unanswered:
    return Unanswered(peer, n, what, age, left, made_for)


def backward(
    id: str = "p0.1",
    coordinator: str = "w0",
    runs: bool = True,
    awaited: tuple[tuple[str, str], ...] = (),
    not_done: tuple[str, ...] = (),
    age: float = 2.0,
) -> PassNow:
    return PassNow(id, coordinator, runs, age, 298.0, [*awaited], [*not_done])
