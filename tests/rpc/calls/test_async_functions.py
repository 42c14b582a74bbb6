"""`async def` functions that peers call run on the event loop of their worker."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
import torch

import gradwire
from gradwire import CallTimeout, Cancelled, UsageError
from gradwire.testing import cluster
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

SEEN: dict[str, list[object]] = {}


@pytest.fixture
def gate(request):
    name = request.node.name
    GATES[name], SEEN[name] = threading.Event(), []
    yield name
    GATES[name].set()


@pytest.fixture
def workers(gate):
    with cluster(3, expose=[sys.modules[__name__]]) as made:
        yield made
        GATES[gate].set()
        assert_nothing_left(made)
        assert not any(member.worker.agent.dispatch.outlasting for member in made)


# -- what runs on the workers


async def double(x):
    await asyncio.sleep(0)
    return 2 * x


async def double_elsewhere(x, to):
    return await gradwire.rpc_async(to, double, args=(x,)) * 3


async def where():
    before = threading.current_thread().name
    await asyncio.sleep(0)
    return before, gradwire.get_worker_info().name


async def fails():
    await asyncio.sleep(0)
    raise KeyError("no")


async def exits():
    raise SystemExit(3)


async def grad_modes():
    seen = [torch.is_grad_enabled()]
    await asyncio.sleep(0)
    with torch.no_grad():
        await asyncio.sleep(0)
        seen.append(torch.is_grad_enabled())
        await asyncio.sleep(0)
    seen.append(torch.is_grad_enabled())
    return seen


async def all_of(values):
    return await asyncio.gather(*map(double, values))


async def waits(gate):
    SEEN[gate].append("waits")
    try:
        await asyncio.Event().wait()
    finally:
        SEEN[gate].append("ended")


async def calls_and_waits(gate):
    await gradwire.rpc_async("w2", waits, args=(gate,))


async def meet(gate, count):
    SEEN[gate].append(count)
    while len(SEEN[gate]) < count:  # the others come on the same loop
        await asyncio.sleep(0)
    return count


class Layer:
    async def forward(self, x):
        await asyncio.sleep(0)
        return x**2


# -- calls


def test_each_way_to_call_runs_it(workers):
    def call():
        rref = gradwire.remote("w1", double, args=(3,))
        return (
            gradwire.rpc_sync("w1", double, args=(1,)),
            gradwire.rpc_async("w1", double, args=(2,)).wait(),
            rref.to_here(),
            gradwire.remote("w1", Layer).rpc_sync().forward(4),
            gradwire.rpc_sync("w0", double, args=(5,)),
        )

    assert workers[0].run(call) == (2, 4, 6, 16, 10)


def test_one_thread_runs_them_all_as_functions_of_their_worker(workers):
    def call():
        return {gradwire.rpc_async("w1", where).wait() for _ in range(5)}

    assert workers[0].run(call) == {("gradwire w1 loop", "w1")}


def test_they_run_at_the_same_time(workers, gate):
    def call():
        futures = [gradwire.rpc_async("w1", meet, args=(gate, 30)) for _ in range(30)]
        return [future.wait() for future in futures]

    assert workers[0].run(call) == [30] * 30


def test_futures_of_calls_are_awaited_inside_and_gradients_go_through(workers):
    x = torch.rand(3, requires_grad=True)

    def call():
        gradwire.rpc_sync("w1", double_elsewhere, args=(x, "w2")).sum().backward()

    workers[0].run(call)
    assert torch.equal(x.grad, torch.full((3,), 6.0))


def test_its_tasks_belong_to_the_same_worker(workers):
    assert workers[0].run(gradwire.rpc_sync, "w1", all_of, args=([1, 2],)) == [2, 4]


def test_gradients_are_kept_for_the_context_of_the_call(workers):
    x = torch.rand(3, requires_grad=True)

    def call():
        with gradwire.context() as context:
            loss = gradwire.rpc_sync("w1", double_elsewhere, args=(x, "w2")).sum()
            gradwire.backward(context, [loss])
            return gradwire.get_gradients(context)[x]

    assert torch.equal(workers[0].run(call), torch.full((3,), 6.0))


def test_grad_mode_is_that_of_the_caller_and_does_not_leave_the_task(workers):
    def call():
        many = [gradwire.rpc_async("w1", grad_modes) for _ in range(4)]
        with torch.no_grad():
            off = gradwire.rpc_async("w1", grad_modes)
        return [future.wait() for future in many], off.wait()

    on, off = workers[0].run(call)
    assert on == [[True, False, True]] * 4
    assert off == [False] * 3


@pytest.mark.parametrize(("function", "kind"), [(fails, KeyError), (exits, gradwire.RemoteError)])
def test_what_it_raises_is_raised_at_the_caller_and_the_loop_goes_on(workers, function, kind):
    def call():
        with pytest.raises(kind):
            gradwire.rpc_sync("w1", function)
        with pytest.raises(kind):
            gradwire.remote("w1", function).to_here()
        return gradwire.rpc_sync("w1", double, args=(1,))

    assert workers[0].run(call) == 2


# -- the end


def test_a_cancelled_call_cancels_the_task_and_what_it_waits_for(workers, gate):
    def call():
        future = gradwire.rpc_async("w1", calls_and_waits, args=(gate,))
        assert eventually(lambda: SEEN[gate] == ["waits"])
        assert future.cancel()
        with pytest.raises(Cancelled):
            future.wait()

    workers[0].run(call)
    assert eventually(lambda: SEEN[gate] == ["waits", "ended"])


def test_a_passed_deadline_cancels_the_task(workers, gate):
    def call():
        with pytest.raises(CallTimeout):
            gradwire.rpc_sync("w1", waits, args=(gate,), timeout=0.05)

    workers[0].run(call)
    assert eventually(lambda: SEEN[gate] == ["waits", "ended"])


def test_the_loss_of_the_caller_cancels_the_task(gate):
    with cluster(2, expose=[sys.modules[__name__]]) as workers:
        workers[0].run(gradwire.rpc_async, "w1", waits, args=(gate,))
        assert eventually(lambda: SEEN[gate] == ["waits"])
        workers.restart(0)
        assert eventually(lambda: SEEN[gate] == ["waits", "ended"])


def test_shutdown_ends_tasks_that_still_run(gate):
    with cluster(2, expose=[sys.modules[__name__]]) as workers:
        workers[0].run(gradwire.remote, "w1", waits, args=(gate,))
        assert eventually(lambda: SEEN[gate] == ["waits"])
        workers[1].worker.close()
        assert SEEN[gate] == ["waits", "ended"]


@pytest.mark.slow
def test_a_checkpoint_does_not_call_it(workers):
    def inside(x):
        return gradwire.rpc_sync("w1", double, args=(x,))

    def call():
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(UsageError, match="which an activation checkpoint cannot repeat"):
            torch.utils.checkpoint.checkpoint(inside, x, use_reentrant=False)

    workers[0].run(call)
