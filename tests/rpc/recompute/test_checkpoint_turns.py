"""Checkpoints whose functions draw from one generator at the same time, or wait unseen."""

from __future__ import annotations

import threading

import pytest
import torch

import gradwire
from gradwire.errors import UsageError
from gradwire.testing import cluster, generators
from tests.rpc.recompute.test_checkpoints import (
    FUNCTIONS,
    KINDS,
    SEED,
    gradient,
    noisy,
    noisy_there,
    quiet,
    quiet_there,
    recomputed,
    same,
)


def impatient(workers):
    for member in workers:
        member.worker.generators.max_wait_seconds = 0.05


def by_wait_all(function, x):
    """torch waits, not gradwire: the worker that waits cannot give away its turn."""
    made = gradwire.rpc_async("w1", function, args=(x, "w0"))
    (there,) = torch.futures.wait_all([made])
    return noisy(there)


@KINDS
def test_a_wait_that_is_not_seen_is_refused_if_the_one_waited_for_draws_here(reentrant):
    def run(x):
        return by_wait_all(noisy_there, x)

    with pytest.raises(
        UsageError, match=r"another function .* ran on this worker at the same time"
    ):
        gradient(lambda x: recomputed(run, x, reentrant), prepare=impatient)


@KINDS
def test_a_wait_that_is_not_seen_does_not_matter_if_nobody_draws(reentrant):
    def run(x):
        made = gradwire.rpc_async("w1", quiet_there, args=(x, "w0"))
        return quiet(torch.futures.wait_all([made])[0])

    found = gradient(lambda x: recomputed(run, x, reentrant), prepare=impatient)

    same(found, gradient(lambda x: run(x).cos().exp(), prepare=impatient))


def masked(member, steps, wrong):
    """Whether the gradient of each step is that of the numbers which its forward has drawn."""

    def program():
        for _ in range(steps):
            x = torch.linspace(0.1, 3.0, 30, requires_grad=True)

            def there(x):
                return gradwire.rpc_sync("w1", noisy, args=(x,)).exp()

            with gradwire.context():
                y = torch.utils.checkpoint.checkpoint(there, x * 1, use_reentrant=False)
                y.sum().backward()
            kept = (y != 1).detach() * 2.0
            if not torch.allclose(x.grad, y.detach() * kept * x.detach().cos()):
                wrong.append(member.worker.agent.directory.me.name)

    member.run(program)


def test_many_trainers_take_turns_at_one_worker():
    wrong: list[str] = []
    with cluster(5, expose=FUNCTIONS, generators=generators(5, seed=SEED)) as workers:
        trainers = [workers[n] for n in (0, 2, 3, 4)]
        threads = [threading.Thread(target=masked, args=(t, 10, wrong)) for t in trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert workers[1].worker.generators.overlaps == 0

    assert wrong == []


@KINDS
def test_a_forward_that_raises_leaves_nothing_behind(reentrant):
    """Its turn is free, here and on the callee, and the next one is exact."""

    def fails(x):
        gradwire.rpc_sync("w1", noisy, args=(noisy(x),))
        raise ZeroDivisionError

    def look(workers):
        def on_w0():
            x = torch.ones(3, requires_grad=True)
            with gradwire.context(), pytest.raises(ZeroDivisionError):
                recomputed(fails, x * 1, reentrant)

        workers[0].run(on_w0)
        for member in workers:
            assert member.worker.generators.take_turn()
            member.worker.generators.end_turn()

    def fine(x):
        return gradwire.rpc_sync("w1", noisy_there, args=(x, "w2"))

    found = gradient(lambda x: recomputed(fine, x, reentrant), prepare=look)

    def plainly(workers):
        def on_w0():
            gradwire.rpc_sync("w1", noisy, args=(noisy(torch.ones(3)),))

        workers[0].run(on_w0)

    same(found, gradient(lambda x: fine(x).cos().exp(), prepare=plainly))


def test_a_turn_is_not_waited_for_longer_than_half_of_the_time_that_is_left():
    with cluster(2, expose=FUNCTIONS, generators=generators(2, seed=SEED)) as workers:
        own = workers[1].worker.generators
        own.max_wait_seconds = 1e6

        def on_w0():
            def there(x):
                return gradwire.rpc_sync("w1", noisy, args=(x,), timeout=4)

            x = torch.ones(3, requires_grad=True)
            with gradwire.context():
                return recomputed(there, x * 1, False).shape

        assert own.take_turn()
        assert workers[0].run(on_w0) == (3,)
        own.end_turn()
        assert own.overlaps > 0
