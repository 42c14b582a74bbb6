"""What rpc_async returns: waiting, callbacks, torch.futures, await."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gradwire as gw
from gradwire.errors import RemoteError, UsageError
from gradwire.options import Options, Timeouts
from gradwire.testing import cluster
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
WEIGHTS: dict[str, torch.Tensor] = {}


@pytest.fixture(scope="module")
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(workers):
    yield
    WEIGHTS.clear()
    assert_nothing_left(workers)


# -- what runs on the workers


class Unlucky(Exception):
    """Exposed, with a constructor that wants two arguments."""

    def __init__(self, what, number):
        super().__init__(f"{what} {number}")


def double(x):
    return x * 2


def reference_to(x):
    return gw.RRef(x)


def wait_then_double(gate, x):
    GATES[gate].wait(30)
    return x * 2


def fail():
    raise Unlucky("number", 13)


def weighted(x):
    return x * WEIGHTS[gw.get_worker_info().name]


# -- waiting


def test_wait_gives_the_value_as_often_as_it_is_asked(workers):
    future = workers[0].run(gw.rpc_async, "w1", double, args=(21,))

    assert [future.wait(), future.wait(), future.value()] == [42, 42, 42]


def test_every_waiter_gets_the_same_object(workers):
    future = workers[0].run(gw.rpc_async, "w1", double, args=(torch.ones(2),))

    assert future.wait() is future.value()


def test_a_future_is_a_future_of_torch(workers):
    future = workers[0].run(gw.rpc_async, "w1", double, args=(1,))

    assert isinstance(future, torch.futures.Future)
    assert isinstance(future, gw.Future)
    assert future.wait() == 2


def test_done_says_whether_the_value_is_there(workers, gate):
    future = workers[0].run(gw.rpc_async, "w1", wait_then_double, args=(gate, 1))

    assert not future.done()
    GATES[gate].set()
    assert future.wait() == 2
    assert future.done()


def test_the_value_of_a_future_that_is_not_done_is_refused(workers, gate):
    future = workers[0].run(gw.rpc_async, "w1", wait_then_double, args=(gate, 1))

    with pytest.raises(UsageError) as raised:
        future.value()
    GATES[gate].set()

    assert str(raised.value) == "the future is not done\nhint: wait() blocks until it is"
    assert future.wait() == 2


def test_a_failure_is_raised_with_its_own_type_wherever_it_is_asked_for(workers):
    future = workers[0].run(gw.rpc_async, "w1", fail)

    for ask in (future.wait, future.wait, future.value):
        with pytest.raises(Unlucky, match="Unlucky on w1: number 13"):
            ask()
    assert future.done()


def test_several_threads_may_wait_for_one_future(workers, gate):
    future = workers[0].run(gw.rpc_async, "w1", wait_then_double, args=(gate, 1))

    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(future.wait) for _ in range(4)]
        GATES[gate].set()

    assert [wait.result() for wait in waits] == [2, 2, 2, 2]


def test_a_future_may_be_waited_for_by_a_thread_that_belongs_to_no_worker(workers):
    future = workers[0].run(gw.rpc_async, "w1", double, args=(1,))

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(future.wait).result() == 2


def test_a_future_that_nobody_holds_is_forgotten(workers):
    def waited():
        future = gw.rpc_async("w1", double, args=(torch.ones(2),))
        return weakref.ref(future.wait()), weakref.ref(future)

    value, future = workers[0].run(waited)

    def is_gone():
        gc.collect()
        return value() is None and future() is None

    assert eventually(is_gone)


@pytest.mark.parametrize("chained", [False, True])
def test_a_future_that_failed_holds_nothing_of_who_waited_for_it(workers, chained):
    def waited():
        pinned = torch.ones(2)
        future = gw.rpc_async("w1", fail)
        if chained:
            future = future.then(lambda f: f.wait())
        with pytest.raises(Unlucky):
            future.wait()
        return weakref.ref(pinned)

    pinned = workers[0].run(waited)

    def is_gone():
        gc.collect()
        return pinned() is None

    assert eventually(is_gone, 0.5)


# -- then


def test_then_gives_what_the_callback_returned(workers):
    def chained():
        return gw.rpc_async("w1", double, args=(5,)).then(lambda f: f.wait() + 1).wait()

    assert workers[0].run(chained) == 11


def test_then_gives_a_future_of_the_same_kind_to_any_length(workers):
    def chained():
        future = gw.rpc_async("w1", double, args=(1,))
        for _ in range(10):
            future = future.then(lambda f: f.wait() + 1)
            assert type(future) is gw.Future
        return future.wait()

    assert workers[0].run(chained) == 12


def test_then_on_a_future_that_is_done_calls_back_too(workers):
    future = workers[0].run(gw.rpc_async, "w1", double, args=(1,))
    future.wait()

    assert future.then(lambda f: f.value() + 1).wait() == 3


def test_an_exception_in_a_callback_keeps_its_type_along_the_chain(workers):
    def raises(future):
        raise ZeroDivisionError(f"callback of {future.wait()}")

    def chained():
        first = gw.rpc_async("w1", double, args=(1,)).then(raises)
        return first, first.then(lambda f: f.wait() + 1)

    for future in workers[0].run(chained):
        with pytest.raises(ZeroDivisionError, match=r"^callback of 2$"):
            future.wait()


def test_a_remote_exception_keeps_its_type_along_the_chain(workers):
    def chained():
        return gw.rpc_async("w1", fail).then(lambda f: f.wait()).then(lambda f: f.wait())

    with pytest.raises(Unlucky, match="number 13") as raised:
        workers[0].run(chained).wait()
    assert isinstance(raised.value, RemoteError)
    assert raised.value.worker == "w1"


def test_a_callback_may_catch_what_came(workers):
    def rescued(future):
        try:
            return future.wait()
        except Unlucky:
            return "rescued"

    assert workers[0].run(lambda: gw.rpc_async("w1", fail).then(rescued).wait()) == "rescued"


@pytest.mark.parametrize("register", ["then", "add_done_callback"])
def test_a_callback_that_cannot_be_called_is_refused(workers, register):
    future = workers[0].run(gw.rpc_async, "w1", double, args=(1,))

    with pytest.raises(TypeError, match="incompatible function arguments: None is not callable"):
        getattr(future, register)(None)
    future.wait()


def test_a_callback_is_called_once_with_the_future(workers):
    called = []
    future = workers[0].run(gw.rpc_async, "w1", double, args=(1,))

    future.add_done_callback(called.append)

    assert eventually(lambda: called)
    assert called == [future]
    called.clear()  # it holds the future


def test_a_done_callback_that_raises_harms_nobody(workers):
    called = []

    def raises(_):
        called.append(1)
        raise ZeroDivisionError

    future = workers[0].run(gw.rpc_async, "w1", double, args=(1,))
    future.add_done_callback(raises)

    assert eventually(lambda: called)
    assert future.wait() == 2
    assert workers[0].run(gw.rpc_sync, "w1", double, args=(2,)) == 4


def logged(caplog):
    """What the library has said, one text for each record."""
    return [record.getMessage() for record in caplog.records if record.name == "gradwire"]


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), SystemExit(3)], ids=repr)
def test_what_a_done_callback_raises_is_logged_with_its_traceback(workers, caplog, error):
    def unlucky_callback(_):
        raise error

    workers[0].run(gw.rpc_async, "w1", double, args=(1,)).add_done_callback(unlucky_callback)

    assert eventually(lambda: logged(caplog))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert (
        record.getMessage()
        == f"w0: a callback of the future of {HERE.__name__}.double on w1 raised"
    )
    assert record.exc_info[1] is error
    assert "in unlucky_callback" in caplog.text


def unlucky_callback(future):
    raise ZeroDivisionError(f"callback of {future.wait()}")


def test_what_a_callback_of_then_raises_is_logged_if_nobody_asks(workers, caplog):
    future = workers[0].run(gw.rpc_async, "w1", double, args=(1,)).then(unlucky_callback)

    assert eventually(future.done)
    assert logged(caplog) == []  # somebody may still ask
    del future
    assert eventually(lambda: (gc.collect(), logged(caplog))[1])
    (text,) = logged(caplog)
    double_on_w1 = f"{HERE.__name__}.double on w1"
    said = f"w0: a callback of the future of {double_on_w1} raised, and nobody has asked"
    assert text.startswith(said)
    assert "in unlucky_callback" in text
    assert text.endswith("ZeroDivisionError: callback of 2")


def test_a_chain_that_nobody_asks_tells_of_what_nobody_saw(workers, caplog):
    made = workers[0].run(gw.rpc_async, "w1", double, args=(1,))
    made.then(unlucky_callback).then(lambda _: "does not look")

    assert eventually(lambda: (gc.collect(), logged(caplog))[1])
    (text,) = logged(caplog)
    assert text.endswith("ZeroDivisionError: callback of 2")


def asked_by_wait(future):
    with pytest.raises(ZeroDivisionError):
        future.wait()


def asked_by_torch(future):
    with pytest.raises(ZeroDivisionError):
        torch.futures.wait_all([future])


def asked_by_await(future):
    async def main():
        await future

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


def asked_by_a_callback(future):
    def rescued(failed):
        with pytest.raises(ZeroDivisionError):
            failed.wait()

    future.then(rescued).wait()


@pytest.mark.parametrize(
    "ask", [asked_by_wait, asked_by_torch, asked_by_await, asked_by_a_callback]
)
def test_what_somebody_has_asked_for_is_not_logged(workers, caplog, ask):
    future = workers[0].run(gw.rpc_async, "w1", double, args=(1,)).then(unlucky_callback)
    ask(future)
    gone = weakref.ref(future)
    del future

    assert eventually(lambda: (gc.collect(), gone() is None)[1])
    finalizers = workers[0].worker.refs._finalizers
    assert eventually(lambda: not finalizers.is_busy)
    assert logged(caplog) == []


def test_what_nobody_has_asked_for_is_logged_after_the_worker_has_left_too(caplog):
    with cluster(2, expose=[HERE]) as made:
        future = made[0].run(gw.rpc_async, "w1", double, args=(1,)).then(unlucky_callback)
        assert eventually(future.done)

    del future
    assert eventually(lambda: (gc.collect(), logged(caplog))[1])
    assert logged(caplog)[0].endswith("ZeroDivisionError: callback of 2")


def test_a_callback_runs_on_a_thread_that_may_block(workers):
    """One that reads would wait for itself: its answer comes by the same channel."""

    def nested(future):
        return gw.rpc_sync("w1", double, args=(future.wait(),)), threading.current_thread().name

    def chained():
        return gw.rpc_async("w1", double, args=(1,)).then(nested).wait()

    value, thread = workers[0].run(chained)
    assert value == 4
    assert thread.startswith("gradwire w0 service")


def test_callbacks_that_wait_do_not_use_up_the_threads():
    def nested(future):
        return gw.rpc_sync("w1", double, args=(future.wait(),))

    def chained():
        futures = [gw.rpc_async("w1", double, args=(n,)).then(nested) for n in range(20)]
        return [future.wait() for future in futures]

    with cluster(2, expose=[HERE], options=Options(threads=2)) as few:
        assert few[0].run(chained) == [4 * n for n in range(20)]


def test_a_callback_runs_as_the_worker_that_made_the_call(workers):
    def name(_):
        return gw.get_worker_info().name

    assert workers[2].run(lambda: gw.rpc_async("w1", double, args=(1,)).then(name).wait()) == "w2"


def test_a_callback_has_the_grad_mode_of_the_call(workers):
    def enabled(_):
        return torch.is_grad_enabled()

    def chained():
        with torch.no_grad():
            future = gw.rpc_async("w1", double, args=(1,))
        return future.then(enabled).wait()

    assert workers[0].run(chained) is False


def test_a_call_made_in_a_callback_is_part_of_the_graph(workers):
    WEIGHTS.update(
        w1=torch.tensor(3.0, requires_grad=True), w2=torch.tensor(5.0, requires_grad=True)
    )
    x = torch.tensor(2.0, requires_grad=True)

    def passed_on(future):
        return gw.rpc_sync("w2", weighted, args=(future.wait(),))

    def program():
        with gw.context():
            gw.rpc_async("w1", weighted, args=(x,)).then(passed_on).wait().backward()

    workers[0].run(program)

    assert (x.grad, WEIGHTS["w1"].grad, WEIGHTS["w2"].grad) == (15, 10, 6)


def test_a_loss_made_in_a_callback_can_be_differentiated_in_it(workers):
    WEIGHTS["w1"] = torch.tensor(3.0, requires_grad=True)
    x = torch.tensor(2.0, requires_grad=True)

    def program():
        with gw.context():
            gw.rpc_async("w1", weighted, args=(x,)).then(lambda f: f.wait().backward()).wait()

    workers[0].run(program)

    assert (x.grad, WEIGHTS["w1"].grad) == (3, 2)


@pytest.mark.slow
def test_a_loss_of_what_callbacks_returned_waits_in_the_right_order():
    """The thread that makes the loss received nothing itself: see Note [The order of waiting]."""
    x = torch.tensor(2.0, requires_grad=True)

    def longer(future):
        value = future.wait()
        for _ in range(8):
            value = gw.rpc_sync("w1", double, args=(value,))
        return value

    def program():
        with gw.context():
            deep = gw.rpc_async("w1", double, args=(x,)).then(longer).then(longer)
            shallow = gw.rpc_async("w1", double, args=(x,)).then(longer)
            a, b = deep.wait(), shallow.wait()
            ((a * 2 * 2).sum() + (b * 1).sum()).backward()

    options = Options(timeouts=Timeouts(backward=1.0))
    with cluster(2, expose=[HERE], options=options) as made, ThreadPoolExecutor(1) as fresh:
        fresh.submit(made[0].run, program).result()

    assert x.grad == 4 * 2**17 + 2**9


# -- with torch.futures


def test_wait_all_gives_all_values_in_order(workers):
    def waited():
        return torch.futures.wait_all([gw.rpc_async("w1", double, args=(n,)) for n in range(5)])

    assert workers[0].run(waited) == [0, 2, 4, 6, 8]


def test_wait_all_raises_a_failure_with_its_own_type(workers):
    def waited():
        torch.futures.wait_all([gw.rpc_async("w1", double, args=(1,)), gw.rpc_async("w1", fail)])

    with pytest.raises(Unlucky, match="Unlucky on w1: number 13"):
        workers[0].run(waited)


def test_wait_all_waits_for_futures_made_by_then(workers):
    def waited():
        futures = [gw.rpc_async("w1", double, args=(n,)) for n in range(3)]
        return torch.futures.wait_all([f.then(lambda f: f.wait() + 1) for f in futures])

    assert workers[0].run(waited) == [1, 3, 5]


def test_collect_all_gives_a_future_of_all(workers):
    def collected():
        futures = [gw.rpc_async("w1", double, args=(n,)) for n in range(3)]
        return [f.wait() for f in torch.futures.collect_all(futures).wait()]

    assert workers[0].run(collected) == [0, 2, 4]


def test_collect_all_raises_a_failure_with_its_own_type(workers):
    def collected():
        futures = [gw.rpc_async("w1", double, args=(1,)), gw.rpc_async("w1", fail)]
        torch.futures.collect_all(futures).wait()

    with pytest.raises(Unlucky, match="Unlucky on w1: number 13"):
        workers[0].run(collected)


def test_values_from_wait_all_are_part_of_the_graph(workers):
    WEIGHTS.update(
        w1=torch.tensor(3.0, requires_grad=True), w2=torch.tensor(5.0, requires_grad=True)
    )
    x = torch.tensor(2.0, requires_grad=True)

    def program():
        with gw.context():
            futures = [gw.rpc_async(to, weighted, args=(x,)) for to in ("w1", "w2")]
            sum(torch.futures.wait_all(futures)).backward()

    workers[0].run(program)

    assert (x.grad, WEIGHTS["w1"].grad, WEIGHTS["w2"].grad) == (8, 2, 2)


# -- with asyncio


def test_a_future_can_be_awaited(workers):
    async def program():
        return await gw.rpc_async("w1", double, args=(21,))

    assert workers[0].run(lambda: asyncio.run(program())) == 42


def test_many_futures_can_be_awaited_at_once(workers):
    async def awaited(n):
        return await gw.rpc_async(f"w{n % 2 + 1}", double, args=(n,))

    async def program():
        return await asyncio.gather(*(awaited(n) for n in range(10)))

    assert workers[0].run(lambda: asyncio.run(program())) == [2 * n for n in range(10)]


def test_awaiting_a_failure_raises_it_with_its_own_type(workers):
    async def program():
        await gw.rpc_async("w1", fail)

    with pytest.raises(Unlucky, match="Unlucky on w1: number 13"):
        workers[0].run(lambda: asyncio.run(program()))


def test_the_loop_goes_on_while_a_future_is_awaited(workers, gate):
    async def program():
        future = gw.rpc_async("w1", wait_then_double, args=(gate, 1))
        asyncio.get_running_loop().call_soon(GATES[gate].set)  # only a free loop gets here
        return await future

    assert workers[0].run(lambda: asyncio.run(program())) == 2


def test_a_task_that_is_cancelled_leaves_its_future_alone(workers, gate):
    async def program():
        future = gw.rpc_async("w1", wait_then_double, args=(gate, 1))

        async def awaited():
            return await future

        task = asyncio.create_task(awaited())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        GATES[gate].set()
        return await future

    assert workers[0].run(lambda: asyncio.run(program())) == 2


def test_a_future_may_come_after_the_loop_that_awaited_it_was_closed(workers, gate):
    async def program():
        future = gw.rpc_async("w1", wait_then_double, args=(gate, 1))

        async def awaited():
            return await future

        task = asyncio.create_task(awaited())
        await asyncio.sleep(0)
        task.cancel()
        return future

    future = workers[0].run(lambda: asyncio.run(program()))
    GATES[gate].set()

    assert future.wait() == 2


def test_awaited_values_are_part_of_the_graph(workers):
    WEIGHTS["w1"] = torch.tensor(3.0, requires_grad=True)
    x = torch.tensor(2.0, requires_grad=True)

    async def program():
        with gw.context():
            y = await gw.rpc_async("w1", weighted, args=(x,))
            (y * y).backward()

    workers[0].run(lambda: asyncio.run(program()))

    assert (x.grad, WEIGHTS["w1"].grad) == (36, 24)


# -- completing the futures that nobody waits for


def test_a_burst_needs_few_threads(workers):
    def burst():
        futures = [gw.rpc_async("w1", double, args=(n,)) for n in range(300)]
        return [future.wait() for future in futures]

    assert workers[0].run(burst) == [2 * n for n in range(300)]
    service = [t.name for t in threading.enumerate() if t.name.startswith("gradwire w0 service")]
    assert len(service) < 10, service


def test_a_blocked_completion_keeps_no_other_one_waiting(workers):
    entered, is_over = threading.Event(), threading.Event()

    def callback(_):  # torch runs it on the thread that completes the first future
        entered.set()
        return is_over.wait(30)

    def both():
        first = torch.futures.collect_all([gw.rpc_async("w1", double, args=(1,))]).then(callback)
        assert entered.wait(30)
        others = torch.futures.wait_all([gw.rpc_async("w2", double, args=(n,)) for n in range(3)])
        is_over.set()
        return others, first.wait()

    assert workers[0].run(both) == ([0, 2, 4], True)


def test_after_a_shutdown_a_blocked_completion_does_not_move_to_the_timer(gate):
    entered = threading.Event()

    def block(_):
        entered.set()
        return GATES[gate].wait(30)

    def program(worker):
        first = gw.rpc_async("w1", double, args=(1,))
        blocked = torch.futures.collect_all([first]).then(block)
        assert entered.wait(30)
        others = [gw.rpc_async("w1", wait_then_double, args=(gate, 1)) for _ in range(2)]
        here = torch.futures.collect_all(others).then(lambda _: threading.current_thread().name)
        worker.close(0.01)
        name = here.wait()
        GATES[gate].set()
        return name, blocked.wait()

    with cluster(2, expose=[HERE]) as two:
        assert two[0].run(program, two[0].worker) == ("gradwire w0 complete", True)


def test_an_interrupt_while_calls_are_made_keeps_no_value(workers, monkeypatch):
    def interrupt(_):
        interrupts.append(None)
        raise KeyboardInterrupt

    def make():
        made = []
        with pytest.raises(KeyboardInterrupt):
            made += [gw.remote("w1", double, args=(n,)) for n in range(50)]
        with pytest.raises(KeyboardInterrupt):
            made += [gw.rpc_async("w1", reference_to, args=(n,)) for n in range(50)]

    interrupts = []
    monkeypatch.setattr(workers[0].worker.agent, "read_some", interrupt)
    workers[0].run(make)
    assert len(interrupts) == 2
    gc.collect()
    assert_nothing_left(workers)
