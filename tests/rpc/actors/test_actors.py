"""Actors: objects on other workers whose methods run one at a time, in order."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
import torch

import gradwire
from gradwire import Cancelled, NotExposed, PeerLost, UsageError
from gradwire.options import Options
from gradwire.rpc.actors.mailboxes import Mailboxes
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


@pytest.fixture(params=[1, 8])
def workers(gate, request):
    with cluster(3, expose=[sys.modules[__name__]], options=Options(threads=request.param)) as made:
        yield made
        GATES[gate].set()
        assert_nothing_left(made)
        assert not any(len(member.worker.part(Mailboxes)) for member in made)
        assert not any(member.worker.agent.dispatch.outlasting for member in made)


# -- what lives on the workers


class Counter:
    def __init__(self, start=0):
        self.value, self.running, self.most = start, 0, 0
        if start is None:
            raise ValueError("no start")

    def add(self, n):
        self.running += 1
        self.most = max(self.most, self.running)
        before = self.value
        torch.ones(64, 64) @ torch.ones(64, 64)  # lets other threads run
        self.value = before + n
        self.running -= 1
        return self.value

    def seen(self):
        return self.value, self.most


class Log:
    def __init__(self):
        self.lines = []

    def write(self, line):
        self.lines.append(line)

    def read(self):
        return self.lines

    def fail(self):
        raise KeyError("no")

    def _private(self):
        pass


class Slow:
    def __init__(self, gate):
        self.gate = gate

    def hold(self):
        SEEN[self.gate].append("holds")
        assert GATES[self.gate].wait(30)

    def mark(self, what):
        SEEN[self.gate].append(what)
        return what

    async def pause(self, what):
        SEEN[self.gate].append(f"{what} begins")
        for _ in range(5):
            await asyncio.sleep(0)
        SEEN[self.gate].append(f"{what} ends")

    def meet(self, count):
        with MEETING:
            SEEN[self.gate].append("here")
            MEETING.notify_all()
            assert MEETING.wait_for(lambda: len(SEEN[self.gate]) >= count, 30)
        return count


MEETING = threading.Condition()


class Layer:
    def __init__(self):
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x):
        return self.weight * x**2

    def gradient(self):
        return self.weight.grad


def add_from_here(handle, n):
    return [handle.add(1).wait() for _ in range(n)][-1]


def write_from_here(handle, name, n):
    futures = [handle.write((name, i)) for i in range(n)]
    for future in futures:
        future.wait()


# -- order


def test_calls_begin_in_the_order_they_were_made_and_one_at_a_time(workers):
    def call():
        counter = gradwire.actor("w1", Counter, args=(10,))
        sums = [future.wait() for future in [counter.add(1) for _ in range(100)]]
        return sums, counter.seen().wait()

    assert workers[0].run(call) == (list(range(11, 111)), (110, 1))


def test_calls_of_several_workers_do_not_meet_and_keep_the_order_of_each(workers):
    def call():
        log = gradwire.actor("w1", Log)
        others = [
            gradwire.rpc_async(to, write_from_here, args=(log, to, 40)) for to in ("w0", "w2")
        ]
        for other in others:
            other.wait()
        return log.rpc_sync().read()

    lines = workers[0].run(call)
    for name in ("w0", "w2"):
        assert [n for who, n in lines if who == name] == list(range(40))


def test_an_actor_of_this_worker_is_used_the_same_way(workers):
    def call():
        counter = gradwire.actor("w0", Counter)
        return [future.wait() for future in [counter.add(2) for _ in range(5)]]

    assert workers[0].run(call) == [2, 4, 6, 8, 10]


def test_a_handle_is_passed_on_and_counts(workers):
    def call():
        counter = gradwire.actor("w1", Counter)
        return gradwire.rpc_sync("w2", add_from_here, args=(counter, 5)), counter.owner_name()

    assert workers[0].run(call) == (5, "w1")


def test_an_async_method_keeps_its_turn_while_it_awaits(workers, gate):
    def call():
        slow = gradwire.actor("w1", Slow, args=(gate,))
        for future in [slow.pause(n) for n in range(3)]:
            future.wait()

    workers[0].run(call)
    assert SEEN[gate] == [f"{n} {what}" for n in range(3) for what in ("begins", "ends")]


def test_max_concurrency_lets_so_many_run_at_a_time(gate):
    with cluster(2, expose=[sys.modules[__name__]]) as workers:

        def call():
            slow = gradwire.actor("w1", Slow, args=(gate,), max_concurrency=3)
            return [future.wait() for future in [slow.meet(3) for _ in range(3)]]

        assert workers[0].run(call) == [3, 3, 3]


def test_a_method_that_holds_its_actor_keeps_no_other_actor_waiting(workers, gate):
    def call():
        slow, counter = gradwire.actor("w1", Slow, args=(gate,)), gradwire.actor("w2", Counter)
        holds, waits = slow.hold(), slow.mark("after")
        assert counter.add(1).wait() == 1
        assert not waits.done()
        GATES[gate].set()
        return waits.wait(), holds.wait()

    assert workers[0].run(call) == ("after", None)


# -- gradients


def test_backward_goes_through_methods(workers):
    x = torch.rand(3, requires_grad=True)

    def call():
        layer = gradwire.actor("w1", Layer)
        layer.forward(x).wait().sum().backward()
        return layer.rpc_sync().gradient()

    gradient = workers[0].run(call)
    torch.testing.assert_close(x.grad, 4 * x.detach())
    torch.testing.assert_close(gradient, x.detach() ** 2)


# -- the end


def test_futures_of_methods_are_awaited(workers):
    async def call():
        counter = gradwire.actor("w1", Counter)
        return await asyncio.gather(*(counter.add(1) for _ in range(5)))

    assert workers[0].run(lambda: asyncio.run(call())) == [1, 2, 3, 4, 5]


def test_what_a_method_raises_is_raised_and_the_actor_goes_on(workers):
    def call():
        log = gradwire.actor("w1", Log)
        with pytest.raises(KeyError, match="no"):
            log.fail().wait()
        log.write("on")
        return log.rpc_sync().read()

    assert workers[0].run(call) == ["on"]


def test_what_the_constructor_raises_is_raised_by_each_method(workers):
    def call():
        counter = gradwire.actor("w1", Counter, args=(None,))
        for _ in range(2):
            with pytest.raises(ValueError, match="no start"):
                counter.add(1).wait()

    workers[0].run(call)


def test_a_call_that_was_cancelled_before_its_turn_never_runs(workers, gate):
    def call():
        slow = gradwire.actor("w1", Slow, args=(gate,))
        holds, dropped, runs = slow.hold(), slow.mark("dropped"), slow.mark("runs")
        assert eventually(lambda: SEEN[gate] == ["holds"])
        assert dropped.cancel()
        with pytest.raises(Cancelled):
            dropped.wait()
        outlasting = workers[1].worker.agent.dispatch.outlasting
        assert eventually(lambda: any(source.cancelled for source in list(outlasting)))
        GATES[gate].set()
        holds.wait()
        return runs.wait()

    assert workers[0].run(call) == "runs"
    assert SEEN[gate] == ["holds", "runs"]


def test_a_lost_worker_fails_the_calls_of_its_actors(workers, gate):
    def call():
        slow = gradwire.actor("w1", Slow, args=(gate,))
        futures = [slow.hold(), slow.mark("never")]
        assert eventually(lambda: SEEN[gate] == ["holds"])
        GATES[gate].set()
        workers[1].worker.agent.hang_up(0, "for the test")
        for future in futures:
            with pytest.raises(PeerLost):
                future.wait()

    workers[0].run(call)


def test_private_methods_and_others_are_refused(workers):
    def call():
        log = gradwire.actor("w1", Log)
        with pytest.raises(NotExposed, match="private"):
            log._private().wait()
        with pytest.raises(AttributeError, match="nothing"):
            log.nothing().wait()

    workers[0].run(call)


@pytest.mark.parametrize("most", [0, -1, True, None, 1.5])
def test_max_concurrency_is_a_number_of_methods(most):
    with (
        cluster(1) as workers,
        pytest.raises(UsageError, match="max_concurrency="),
    ):
        workers[0].run(gradwire.actor, "w0", Counter, max_concurrency=most)
