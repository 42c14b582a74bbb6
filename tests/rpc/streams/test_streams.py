"""Streams: the items of a generator on another worker, as they come."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading

import pytest
import torch

import gradwire
from gradwire import CallTimeout, Cancelled, NotExposed, NotSerializable, PeerLost, UsageError
from gradwire.agent.messages import Done
from gradwire.rpc.streams.messages import Items
from gradwire.rpc.streams.serving import Streams
from gradwire.testing import cluster
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

SEEN: dict[str, list[object]] = {}
"""What generators have left behind, by test."""


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
        for member in made:
            assert not member.worker.part(Streams).readers


# -- what runs on the workers


def count(gate, n, start=0):
    try:
        for i in range(start, n):
            SEEN[gate].append(i)
            yield i
        SEEN[gate].append("over")
    finally:
        SEEN[gate].append("ended")


def scaled(n, x):
    total = x
    for i in range(1, n + 1):
        total = total * x
        yield total, {"by": i, "sum": total.sum()}


def then_raises(n):
    yield from range(n)
    raise KeyError("no")


def one_buffer(n):
    buffer, row = torch.zeros(2), []
    for i in range(n):
        buffer.fill_(i)
        row.append(i)
        yield buffer, row


def modes():
    yield torch.is_grad_enabled(), gradwire.get_worker_info().name
    with torch.no_grad():
        yield torch.is_grad_enabled(), gradwire.get_worker_info().name
        yield torch.is_grad_enabled(), gradwire.get_worker_info().name
    yield torch.is_grad_enabled(), gradwire.get_worker_info().name


def grad_mode():
    return torch.is_grad_enabled()


def waits_after_one(gate):
    yield 1
    assert GATES[gate].wait(30)
    yield 2


def calls_after_one(gate):
    try:
        yield 1
        gradwire.rpc_sync("w2", hold, args=(gate,))
        yield 2
    except Cancelled:
        SEEN[gate].append("cancelled")
        raise


def hold(gate):
    SEEN[gate].append("holds")
    assert GATES[gate].wait(30)


def one_bad_item():
    yield 1
    yield lambda: None
    yield 3


def last_words(gate):
    try:
        yield 1
        yield 2
    finally:
        SEEN[gate].append(gradwire.rpc_sync("w2", name))
        raise ValueError("not so soon")


def name():
    return gradwire.get_worker_info().name


def references(n):
    for i in range(n):
        yield gradwire.RRef(torch.full((2,), float(i)))


def no_generator():
    return [1, 2]


async def of_a_loop():
    yield 1


def through(gate, to, n):
    return sum(gradwire.stream(to, count, args=(gate, n)))


# -- reading


@pytest.mark.parametrize("ahead", [1, 2, 3, 4, 50])
@pytest.mark.parametrize("to", ["w0", "w1"])
def test_all_items_come_in_order(workers, gate, ahead, to):
    def read():
        return list(gradwire.stream(to, count, args=(gate,), kwargs={"n": 20}, ahead=ahead))

    assert workers[0].run(read) == list(range(20))
    assert SEEN[gate] == [*range(20), "over", "ended"]


def test_no_items_end_at_once(workers, gate):
    assert workers[0].run(lambda: list(gradwire.stream("w1", count, args=(gate, 0)))) == []


@pytest.mark.parametrize("ahead", [1, 4, 5])
def test_the_generator_is_no_more_than_so_many_items_ahead(workers, gate, ahead):
    def read():
        made = []
        for n, item in enumerate(gradwire.stream("w1", count, args=(gate, 30), ahead=ahead), 1):
            assert item == n - 1
            made.append(len([i for i in SEEN[gate] if isinstance(i, int)]) - n)
        return made

    assert max(workers[0].run(read)) <= ahead


def test_no_thread_is_kept_by_a_stream_that_waits_for_its_reader(workers, gate):
    def read():
        streams = [gradwire.stream("w1", count, args=(gate, 9), ahead=2) for _ in range(20)]
        loops = [iter(stream) for stream in streams]
        assert [next(loop) for loop in loops] == [0] * 20
        dispatch = workers[1].worker.agent.dispatch
        assert eventually(lambda: dispatch.active == 0)
        assert [sum(loop) for loop in loops] == [36] * 20

    workers[0].run(read)


def test_an_item_comes_though_the_next_one_is_not_made(workers, gate):
    def read():
        items = iter(gradwire.stream("w1", waits_after_one, args=(gate,)))
        first = next(items)
        GATES[gate].set()
        return first, list(items)

    assert workers[0].run(read) == (1, [2])


def test_an_item_is_what_it_was_when_it_was_yielded(workers, gate):
    def read():
        return list(gradwire.stream("w1", one_buffer, args=(8,), ahead=8))

    for n, (buffer, row) in enumerate(workers[0].run(read)):
        assert torch.equal(buffer, torch.full((2,), float(n)))
        assert row == list(range(n + 1))


def test_a_task_reads_with_async_for(workers, gate):
    async def read():
        return [item async for item in gradwire.stream("w1", count, args=(gate, 9))]

    assert workers[0].run(lambda: asyncio.run(read())) == list(range(9))


def test_a_served_function_reads_a_stream_of_a_third_worker(workers, gate):
    assert workers[0].run(gradwire.rpc_sync, "w1", through, args=(gate, "w2", 10)) == 45


def test_references_are_counted(workers, gate):
    def read():
        return [rref.to_here() for rref in gradwire.stream("w1", references, args=(5,))]

    assert [int(value[0]) for value in workers[0].run(read)] == [0, 1, 2, 3, 4]


def test_references_that_are_not_read_are_let_go(workers, gate):
    def read():
        for _ in gradwire.stream("w1", references, args=(50,), ahead=8):
            break

    workers[0].run(read)  # what is left is looked for by the fixture


# -- gradients


@pytest.mark.parametrize("ahead", [1, 4])
def test_backward_through_items_is_exact(workers, gate, ahead):
    def loss_of(items):
        weighed = [(n + 1) * y.sum() * about["sum"] for n, (y, about) in enumerate(items)]
        return torch.stack(weighed).sum()

    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(loss_of(scaled(4, x)), x)

    def read():
        loss_of(gradwire.stream("w1", scaled, args=(4, x), ahead=ahead)).backward()

    workers[0].run(read)
    torch.testing.assert_close(x.grad, expected)


def test_gradients_come_in_the_map_of_a_context(workers, gate):
    x = torch.rand(3, requires_grad=True)

    def read():
        with gradwire.context() as context:
            items = gradwire.stream("w1", scaled, args=(3, x))
            loss = sum(y.sum() for y, _ in items)
            gradwire.backward(context, [loss])
            return gradwire.get_gradients(context)[x]

    torch.testing.assert_close(workers[0].run(read), 2 * x + 3 * x**2 + 4 * x**3)


def test_edges_of_items_that_are_not_read_are_released(workers, gate):
    x = torch.rand(3, requires_grad=True)

    def read():
        for y, _ in gradwire.stream("w1", scaled, args=(50, x), ahead=8):
            y.sum().backward()
            break

    workers[0].run(read)
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_the_modes_of_the_generator_are_its_own(workers, gate):
    def read():
        seen = list(gradwire.stream("w1", modes, ahead=1))
        with torch.no_grad():
            outside = list(gradwire.stream("w1", modes, ahead=1))
        served = [gradwire.rpc_sync("w1", grad_mode) for _ in range(3)]
        return seen, outside, served

    seen, outside, served = workers[0].run(read)
    assert seen == [(True, "w1"), (False, "w1"), (False, "w1"), (True, "w1")]
    assert outside == [(False, "w1")] * 4
    assert served == [True] * 3


# -- the end


def test_what_the_generator_raises_is_raised_at_its_place(workers, gate):
    def read():
        items = iter(gradwire.stream("w1", then_raises, args=(6,)))
        got = [next(items) for _ in range(6)]
        with pytest.raises(KeyError, match="no") as caught:
            next(items)
        assert "in then_raises" in caught.value.remote_traceback
        with pytest.raises(StopIteration):
            next(items)
        return got

    assert workers[0].run(read) == list(range(6))


def test_leaving_the_loop_ends_the_generator(workers, gate):
    def read():
        stream = gradwire.stream("w1", count, args=(gate, 1000))
        for item in stream:
            if item == 5:
                break
        assert eventually(lambda: SEEN[gate][-1] == "ended")
        return list(stream)

    assert workers[0].run(read) == []
    assert "over" not in SEEN[gate]


def test_dropping_the_stream_ends_the_generator(workers, gate):
    def read():
        stream = gradwire.stream("w1", count, args=(gate, 1000))
        loop = iter(stream)
        assert next(loop) == 0
        del loop, stream
        gc.collect()

    workers[0].run(read)
    assert eventually(lambda: SEEN[gate][-1] == "ended")


def test_a_task_that_leaves_its_loop_ends_the_generator(workers, gate):
    async def read():
        async for item in gradwire.stream("w1", count, args=(gate, 1000)):
            if item == 3:
                break

    workers[0].run(lambda: asyncio.run(read()))
    assert eventually(lambda: SEEN[gate][-1] == "ended")


def test_close_returns_when_the_finally_has_run(workers, gate):
    def read():
        with gradwire.stream("w1", count, args=(gate, 1000)) as stream:
            loop = iter(stream)
            assert next(loop) == 0
            stream.close()
            ended = SEEN[gate][-1]
        return ended, list(loop)

    ended, rest = workers[0].run(read)
    assert (ended, rest) == ("ended", [])


def test_a_task_waits_for_the_end_with_aclose(workers, gate):
    async def read():
        async with gradwire.stream("w1", count, args=(gate, 1000)) as stream:
            loop = aiter(stream)
            assert await anext(loop) == 0
        return SEEN[gate][-1]

    assert workers[0].run(lambda: asyncio.run(read())) == "ended"


def test_close_raises_what_the_finally_raises_and_that_may_make_calls(workers, gate):
    def read():
        stream = gradwire.stream("w1", last_words, args=(gate,), ahead=1)
        loop = iter(stream)
        assert next(loop) == 1
        with pytest.raises(ValueError, match="not so soon"):
            stream.close()
        stream.close()  # it is closed

    workers[0].run(read)
    assert SEEN[gate] == ["w2"]


def test_what_a_generator_calls_is_cancelled_when_it_is_closed(workers, gate):
    def read():
        stream = gradwire.stream("w1", calls_after_one, args=(gate,))
        loop = iter(stream)
        assert next(loop) == 1
        assert eventually(lambda: SEEN[gate] == ["holds"])
        stream.close()

    workers[0].run(read)
    assert SEEN[gate] == ["holds", "cancelled"]


def test_an_item_that_does_not_come_in_time_ends_the_stream(workers, gate):
    def read():
        items = iter(gradwire.stream("w1", waits_after_one, args=(gate,), timeout=0.05))
        assert next(items) == 1
        with pytest.raises(CallTimeout, match=r"next item of .*waits_after_one on w1"):
            next(items)
        assert list(items) == []

    workers[0].run(read)


def test_a_lost_worker_is_named_by_the_next_item(workers, gate):
    def read():
        items = iter(gradwire.stream("w1", count, args=(gate, 1000), ahead=8))
        assert next(items) == 0
        workers.restart(1)
        with pytest.raises(PeerLost, match="w1 was lost"):
            next(items)
        assert list(items) == []

    workers[0].run(read)


def test_the_generator_of_a_lost_reader_ends(gate):
    with cluster(2, expose=[sys.modules[__name__]]) as workers:
        loop = workers[0].run(lambda: iter(gradwire.stream("w1", count, args=(gate, 1000))))
        assert workers[0].run(next, loop) == 0
        workers.restart(0)
        assert eventually(lambda: SEEN[gate][-1] == "ended")


def test_an_item_that_cannot_be_sent_ends_the_stream(workers, gate):
    def read():
        items = iter(gradwire.stream("w1", one_bad_item))
        assert next(items) == 1
        with pytest.raises(NotSerializable):
            next(items)

    workers[0].run(read)


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (no_generator, UsageError, "returned a list: stream.. takes a generator function"),
        (of_a_loop, UsageError, "returned a async_generator"),
        (eventually, NotExposed, "eventually is not exposed"),
    ],
)
def test_what_is_no_generator_is_refused_at_the_first_item(workers, gate, function, kind, text):
    def read():
        with pytest.raises(kind, match=text):
            next(iter(gradwire.stream("w1", function)))

    workers[0].run(read)


def test_two_threads_cannot_read_one_stream(workers, gate):
    def read():
        stream = gradwire.stream("w1", waits_after_one, args=(gate,))
        loop = iter(stream)
        assert next(loop) == 1
        with stream._reader._alone(), pytest.raises(UsageError, match="at the same time"):
            next(loop)
        GATES[gate].set()
        return list(loop)

    assert workers[0].run(read) == [2]


@pytest.mark.slow
def test_inside_a_checkpoint_no_stream_is_opened(workers, gate):
    def inside(x):
        return gradwire.stream("w1", scaled, args=(2, x))

    def read():
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(UsageError, match="inside an activation checkpoint"):
            torch.utils.checkpoint.checkpoint(inside, x, use_reentrant=False)

    workers[0].run(read)


# -- what a peer may send


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Done(), "a stream was answered by Done"),
        (Items([], is_last=False), "no item, though it goes on"),
    ],
)
def test_a_wrong_answer_ends_the_stream(workers, gate, answer, text, monkeypatch):
    agent = workers[1].worker.agent
    honest = agent.answer

    def lie(source, message, payload=(), *, deadline):
        if isinstance(message, Items):
            message, payload = answer, ()
        return honest(source, message, payload, deadline=deadline)

    monkeypatch.setattr(agent, "answer", lie)

    def read():
        with pytest.raises(gradwire.BadMessage, match=text):
            next(iter(gradwire.stream("w1", count, args=(gate, 3))))

    workers[0].run(read)
