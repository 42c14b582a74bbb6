"""Steps that few programs take: operators in other threads, finalizers, inner backwards, draws,
contexts that stay open, results that nobody reads.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable

import torch

import gradwire
from gradwire.errors import PeerLost
from tests.oracle.finalizers import Finalizer
from tests.oracle.functions import Fuse, HandWritten, Reversible
from tests.oracle.interpreter import (
    STATES,
    STEPS,
    as_local,
    as_this_worker,
    call,
    go_on,
    here,
    is_local,
    operate,
    run_block,
    run_steps,
)
from tests.oracle.places import run_in
from tests.oracle.state import State

LOST = "w5"
"""a worker that has been there, and is no more"""

# -- what travels


def hop(place: str | None, x: torch.Tensor) -> torch.Tensor:
    parameter = STATES[here()].parameter
    return run_in(place, lambda: x + parameter)


def times_parameter(x: torch.Tensor) -> torch.Tensor:
    return x * STATES[here()].parameter


def finalized(seed: int, value: torch.Tensor) -> torch.Tensor:
    """What a finalizer calls. One that is late belongs to another program."""
    state = STATES.get(here())
    if state is not None and state.seed == seed:
        state.count(f"finalized with {value.detach().sum().item()}")
    return value * 1


# -- the steps


def _elsewhere(state: State, values: list, place: str, operator: str, i: int, j: int) -> None:
    values.append(run_in(place, lambda: operate(state, values, operator, i, j)))


def _chains(state: State, values: list, chains: list, joint: str, i: int) -> None:
    ends = []
    for hops in chains:
        value = values[i % len(values)]
        for to, there, place in hops:
            value = call(to, hop, there, value)()
            value = run_in(place, lambda value=value: value + 1)
        ends.append(value)
    values.append(run_in(joint, lambda: ends[0] + ends[1] * 2))


def _finalizer(state: State, values: list, to: int, i: int) -> None:
    value = values[i % len(values)] * 1  # nobody changes this one in place

    def say() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            call(to, finalized, state.seed, value)()

    Finalizer(state, say)


def _fuse(state: State, values: list, i: int) -> None:
    values.append(Fuse.apply(state, values[i % len(values)]))


def _hand_written(state: State, values: list, block: list, i: int) -> None:
    x = values[i % len(values)].clone()  # as for a checkpoint: nobody changes this one
    run = on_this_worker(lambda x: run_steps(block, [x])[-1])
    values.append(HandWritten.apply(run, x))


def _reversible(state: State, values: list, to: int | None, i: int, j: int) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * state.parameter if to is None else call(to, times_parameter, x)()

    a, b = (values[n % len(values)].clone() for n in (i, j))
    values.extend(Reversible.apply(on_this_worker(f), torch.relu, a, b))


def on_this_worker(function: Callable) -> Callable:
    """In one process, a function that runs as this worker whenever it is called."""
    worker = here()

    def run(x: torch.Tensor) -> torch.Tensor:
        with as_local(worker) if is_local() else contextlib.nullcontext():
            return function(x)

    return run


def _draw(state: State, values: list, draw: str, i: int) -> None:
    x = values[i % len(values)]
    match draw:
        case "dropout" if x.is_cpu and not torch.is_inference_mode_enabled():
            values.append(torch.nn.functional.dropout(x, 0.5))
        case "dropout":  # which cannot be given a generator in this mode, or on a device
            values.append(x * torch.bernoulli(torch.full((3,), 0.5)).to(x.device) * 2)
        case "randint":
            values.append(x * torch.randint(0, 3, (3,)).to(x.device))
        case _:
            values.append(x[torch.randperm(3).to(x.device)])


def _room(state: State, values: list, block: list) -> None:
    """Take these steps in a new context, which stays open; the code around is not in it."""

    def run() -> None:
        opened = gradwire.context()
        opened.__enter__()
        state.contexts.append(opened)
        go_on(state, values, block)

    if is_local():
        go_on(state, values, block)
    else:
        contextvars.Context().run(as_this_worker(run))


def _unread(state: State, values: list, to: int, how: str, block: list, i: int) -> None:
    arguments = [values[i % len(values)]]
    values.append(values[i % len(values)] + 1)
    if not is_local():  # where it would have no effect
        call(to, run_block, block, [0, -1], arguments, how=how)


def _never_leaves(state: State, values: list, i: int) -> None:
    value = values[i % len(values)]
    values.append(value * 2)
    if is_local():
        return
    with contextlib.suppress(PeerLost):
        gradwire.rpc_sync(LOST, times_parameter, args=(value,))
        raise AssertionError(f"{LOST} has answered")


STEPS.update(
    {
        "room": _room,
        "unread": _unread,
        "never leaves": _never_leaves,
        "elsewhere": _elsewhere,
        "chains": _chains,
        "finalizer": _finalizer,
        "fuse": _fuse,
        "hand-written": _hand_written,
        "reversible": _reversible,
        "draw": _draw,
    }
)
