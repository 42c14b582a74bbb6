"""The actors of a job, in a placement group; both are gone at the end of the `with` block."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, final

import ray
from ray.util.client import ray as ray_client
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gradwire.errors import JoinTimeout, UsageError
from gradwire.ray.seat import Keys, Orders, Report, Seat

Resources = Mapping[str, float]

_LOOK_AGAIN_SECONDS = 1.0
_FETCH_SECONDS = 60.0
_END_SECONDS = 10.0
_MOST_REASON = 300
_RAISED = re.compile(r"[\w.]*(Error|Exception): ")
_GUESSES = " Some common causes"
_NO_REASON = ("The actor died", "class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:")
_NAMED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}

_log = logging.getLogger("gradwire")


class SeatEvent(NamedTuple):
    """A worker reported; or its actor is lost, and why."""

    rank: int
    news: Report | str


@final
class Seats:
    """One bundle of `resources` for each seat, and the actors in them."""

    def __init__(self, count: int, resources: Resources | None, strategy: str) -> None:
        self._wanted = _checked(resources)
        self._strategy, self._count = strategy, count
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}

    def __enter__(self) -> Seats:
        if ray_client.is_connected():
            raise UsageError(
                "gradwire.ray needs a driver on a node of the cluster, not a Ray Client",
                hint="start the program there: ray job submit -- python program.py",
            )
        if not ray.is_initialized():
            ray.init()
        return self

    def __exit__(self, *_: object) -> None:
        """End all actors and remove the placement group, even if interrupted again."""
        if not ray.is_initialized():  # the program has called ray.shutdown(), which ends them
            return
        try:
            self._end(list(self._actors))
        finally:
            if self._group is not None:
                remove_placement_group(self._group)

    def reserve(self, seconds: float) -> None:
        """Wait until the cluster has set aside a bundle for each seat."""
        try:
            bundles = [dict(self._wanted) for _ in range(self._count)]
            self._group = placement_group(bundles, strategy=self._strategy)
        except ValueError as error:
            raise UsageError(f"Ray makes no placement group of these bundles: {error}") from error
        deadline = time.monotonic() + seconds
        # One wait is a call into C++ that Ctrl-C does not interrupt.
        while not self._group.wait(_LOOK_AGAIN_SECONDS):
            if time.monotonic() >= deadline:
                raise JoinTimeout(
                    f"Ray found no places for {self._count} workers within {seconds:g} s: "
                    f"{self.shortage()}",
                    hint="ask for less with workers= or resources=, end other jobs, or wait longer "
                    "with Timeouts(join=…)",
                )

    def shortage(self) -> str:
        """What was asked for, and what there is."""
        there = {name: n for name, n in ray.available_resources().items() if ":" not in name}
        return f"each needs {self._wanted}, {self._strategy}; the cluster has {there} available"

    def are_on_one_node(self) -> bool:
        """Whether all seats are on the node of this process."""
        table = ray.util.placement_group_table(self._group)
        here = ray.get_runtime_context().get_node_id()
        return set(table["bundles_to_node_id"].values()) == {here}

    def start(self, orders: Orders, keys: Keys, given: Any) -> None:  # noqa: ANN401
        """Start the actor of a worker; one of it that was lost is ended before."""
        self._end([orders.rank])
        asked = {_NAMED[name]: n for name, n in self._wanted.items() if name in _NAMED}
        others = {name: n for name, n in self._wanted.items() if name not in _NAMED}
        # Ranks are 0 to n - 1, or 1 to n if the driver is worker 0.
        place = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=orders.rank % self._count
        )
        made = ray.remote(Seat).options(
            **{"num_cpus": 0, **asked}, resources=others, scheduling_strategy=place
        )
        actor = self._actors[orders.rank] = made.remote(orders.name)
        calls = actor.prepare.remote(orders, given), actor.work.remote(keys), actor.leave.remote()
        self._calls |= dict.fromkeys(calls, orders.rank)

    def events(self, seconds: float) -> list[SeatEvent]:
        """Wait for events for at most `seconds`; returns those that happened."""
        if not ray.is_initialized():  # any call of Ray's would start a cluster of its own
            raise UsageError(
                "ray.shutdown() was called, which ends the workers", hint="call it afterwards"
            )
        patience = max(0.0, min(seconds, _LOOK_AGAIN_SECONDS))
        if not self._calls:
            time.sleep(patience)
            return []
        ready, _ = ray.wait(list(self._calls), timeout=patience)
        return list(self._events_of(ready)) if ray.is_initialized() else []

    def _events_of(self, calls: list[Any]) -> Iterator[SeatEvent]:
        for call in calls:
            rank = self._calls.pop(call, None)
            if rank is None:
                continue
            try:
                yield SeatEvent(rank, ray.get(call, timeout=_FETCH_SECONDS))
            except ray.exceptions.RayError as error:
                self._forget_calls(rank)
                yield SeatEvent(rank, _reason(error))

    def _forget_calls(self, rank: int) -> None:
        self._calls = {call: other for call, other in self._calls.items() if other != rank}

    def _end(self, ranks: list[int]) -> None:
        """Kill the actors of these workers, and wait until Ray says that they are dead."""
        actors = [self._actors.pop(rank) for rank in ranks if rank in self._actors]
        for actor in actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        # A call to a dead actor fails; to one that is not yet dead it waits.
        calls = [actor.leave.remote() for actor in actors]
        if calls:
            _, alive = ray.wait(calls, num_returns=len(calls), timeout=_END_SECONDS)
            for call in alive:
                _log.error("the actor of %s did not end when killed", call)


def _checked(resources: Resources | None) -> dict[str, float]:
    """What each seat needs, without zeros, which Ray refuses."""
    wanted = {name: n for name, n in ({"CPU": 1} if resources is None else resources).items() if n}
    if not wanted or not all(n > 0 for n in wanted.values()):
        raise UsageError(
            f"a worker cannot be placed by resources={dict(resources or {})}",
            hint='name what each worker needs: resources={"CPU": 1, "GPU": 1}',
        )
    return wanted


def _reason(error: Exception) -> str:
    """What Ray says about the end of an actor, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    if raised:  # the end of a traceback, as of an actor that could not import this module
        return raised[-1][:_MOST_REASON]
    said = " ".join(line for line in lines if not line.startswith(_NO_REASON))
    return (said or lines[0]).partition(_GUESSES)[0][:_MOST_REASON].rstrip(".")
