"""A round: some chains of calls over the workers, differentiated, compared with one process."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

import gradwire
from tests.storm import forks, hazards, stuck
from tests.storm.notes import NOTES

WEIGHTS = {"w0": 2.0, "w1": 3.0, "w2": 5.0}
DEADLINE, SLACK = 10.0, 5.0
"""Seconds that a call or a pass may take, and what a busy machine adds."""

_here: dict[str, torch.Tensor] = {}
_pool = ThreadPoolExecutor(2, thread_name_prefix="storm")


def reset() -> None:
    _here.update(weights())


def weights() -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(weight, dtype=torch.float64, requires_grad=True)
        for name, weight in WEIGHTS.items()
    }


def warm_up() -> None:
    """What the first backward of a process imports."""
    torch.ones(1, requires_grad=True).sum().backward()


# -- what peers call


def onward(route: list[str], trained: bool, x: torch.Tensor) -> torch.Tensor:
    """This worker's weight, then those along the route."""
    me = gradwire.get_worker_info().name
    hazards.litter(None, [name for name in WEIGHTS if name != me])
    weight = _here[me] if trained else _here[me].detach()
    y = x * weight
    return gradwire.rpc_sync(route[0], onward, args=(route[1:], trained, y)) if route else y


def gradient(context: int) -> float | None:
    found = gradwire.get_gradients(context).get(_here[gradwire.get_worker_info().name])
    return None if found is None else found.item()


def touch(x: torch.Tensor) -> torch.Tensor:
    """What finalizers and signal handlers call."""
    return x * 2


# -- a round


class Plan:
    """Chains of routes, where their ends are worked on, and how they are differentiated."""

    def __init__(self, chance: random.Random, kinds: list[str]) -> None:
        names = list(WEIGHTS)
        self.chains = [
            [
                [chance.choice(names) for _ in range(chance.randint(1, 3))]
                for _ in range(chance.randint(1, 5))
            ]
            for _ in range(chance.randint(1, 3))
        ]
        places = list(PLACES) if "threads" in kinds else ["here"]
        self.places = [chance.choice(places) for _ in self.chains]
        self.joint = chance.choice(places)
        self.into_map = chance.random() < 0.5
        self.litters = chance.random() < 0.7
        self.asynchronous = chance.random() < 0.3

    def loss(self, x: torch.Tensor, hop: Callable) -> torch.Tensor:
        ends = []
        for chain, place in zip(self.chains, self.places, strict=True):
            y = x
            for route in chain:
                y = hop(route, y)
                y = PLACES[place](lambda y=y: y + 1)
                y = y / 64  # a power of two, so that all stays exact
            ends.append(y)
        return PLACES[self.joint](lambda: sum(end.sum() for end in ends))


def one(chance: random.Random, kinds: list[str]) -> None:
    """A round that nothing may disturb: whatever it raises is wrong."""
    forks.check_original()
    plan = Plan(chance, kinds)
    runner = chance.choice(list(RUNNERS)) if "threads" in kinds else "here"
    try:
        RUNNERS[runner](lambda: _one(plan))
    except Exception as error:
        forks.leave_if_it_hides_an_exit(error)
        NOTES.wrong(f"a round raised {type(error).__name__}: {error}")
    if "forks" in kinds and chance.random() < 0.1:
        forks.fork(chance)


def _one(plan: Plan) -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    others = [name for name in WEIGHTS if name != gradwire.get_worker_info().name]
    with gradwire.context() as context:

        def hop(route: list[str], y: torch.Tensor) -> torch.Tensor:
            args = (route[1:], plan.into_map, y)
            if plan.asynchronous:
                y = timed("call", lambda: gradwire.rpc_async(route[0], onward, args=args).wait())
            else:
                y = timed("call", lambda: gradwire.rpc_sync(route[0], onward, args=args))
            if plan.litters:
                hazards.litter(y, others)
            return y

        found = _differentiated(plan, context, x, hop)
        hazards.settle()
    right = expected(plan)
    if found != right:
        NOTES.wrong(f"gradients {found}, in one process {right}: {vars(plan)}")
    NOTES.done("rounds")


def _differentiated(plan: Plan, context: int, x: torch.Tensor, hop: Callable) -> dict:
    loss = plan.loss(x, hop)
    if not plan.into_map:
        timed("backward", loss.backward)
        return {"x": x.grad.tolist()}
    timed("backward", lambda: gradwire.backward(context, [loss]))
    found = {"x": gradwire.get_gradients(context)[x].tolist()}
    for name in WEIGHTS:
        asked = functools.partial(gradwire.rpc_sync, name, gradient, args=(context,))
        found[name] = timed("call", asked)
    return found


def expected(plan: Plan) -> dict:
    """The same in one process."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    local = weights()

    def hop(route: list[str], y: torch.Tensor) -> torch.Tensor:
        for name in route:
            y = y * (local[name] if plan.into_map else local[name].detach())
        return y

    plan.loss(x, hop).backward()
    found: dict = {"x": x.grad.tolist()}
    if plan.into_map:
        found |= {name: None if w.grad is None else w.grad.item() for name, w in local.items()}
    return found


def timed(what: str, function: Callable):
    """What the function returns; it is wrong if that takes longer than its deadline."""
    began = time.monotonic()
    try:
        with stuck.Wait():
            return function()
    finally:
        took = time.monotonic() - began
        NOTES.done(what)
        if took > DEADLINE + SLACK and forks.is_original():
            NOTES.wrong(f"a {what} took {took:.1f} s, its deadline is {DEADLINE:g} s")


# -- where an operator or a whole round may run


def _in_a_fresh_thread(function: Callable):
    outcome: list = []
    errors: list = []
    copied = contextvars.copy_context()

    def main() -> None:
        try:
            outcome.append(copied.run(function))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=main, name="storm fresh", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return outcome[0] if outcome else None


def _in_the_pool(function: Callable):
    return _pool.submit(function).result()


def _by_asyncio(function: Callable):
    return asyncio.run(asyncio.to_thread(function))


PLACES: dict[str, Callable] = {
    "here": lambda function: function(),
    "fresh": _in_a_fresh_thread,
    "pool": _in_the_pool,
    "asyncio": _by_asyncio,
}
RUNNERS: dict[str, Callable] = {
    "here": lambda function: function(),
    "fresh": _in_a_fresh_thread,
    "asyncio": _by_asyncio,
}
