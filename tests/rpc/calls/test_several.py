"""Futures as in concurrent.futures: result, exception, timeouts, as_completed and wait."""

from __future__ import annotations

import concurrent.futures
import sys
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.errors import ArgumentTypeError, RemoteError, UsageError
from gradwire.testing import cluster
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
SOON = 0.01


@pytest.fixture(scope="module")
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(workers):
    yield
    assert_nothing_left(workers)


@pytest.fixture
def call(workers):
    """Makes a call from w0, as rpc_async does."""

    def make(to, func, *args):
        return workers[0].run(gw.rpc_async, to, func, args=args)

    return make


def double(x):
    return x * 2


def fail():
    raise KeyError("nowhere")


def wait_then_double(gate, x):
    assert GATES[gate].wait(30)
    return x * 2


def first_done(gate):
    """Waits for two calls of its own, one of which ends only when this has seen the other."""
    late = gw.rpc_async("w2", wait_then_double, args=(gate, 1))
    early = gw.rpc_async("w2", double, args=(2,))
    found = []
    for future in gw.as_completed([late, early]):
        found.append(future.wait())
        GATES[gate].set()
    return found


# -- one future


def test_the_result_is_what_wait_returns(call):
    future = call("w1", double, 21)

    assert future.result() == future.result(timeout=30) == future.wait(30) == 42
    assert future.exception() is None


def test_the_exception_is_returned_as_often_as_it_is_asked_for(call):
    future = call("w1", fail)

    for _ in range(2):
        error = future.exception(timeout=30)
        assert isinstance(error, KeyError)
        assert isinstance(error, RemoteError)
    with pytest.raises(KeyError, match="nowhere"):
        future.result()


@pytest.mark.parametrize("ask", ["wait", "result", "exception"])
@pytest.mark.parametrize("seconds", [0, SOON, -1])
def test_a_wait_that_is_over_leaves_the_call_running(call, gate, ask, seconds):
    future = call("w1", wait_then_double, gate, 4)

    for _ in range(3):
        with pytest.raises(gw.WaitTimeout, match=r"the time to wait for <.*wait_then_double on w1"):
            getattr(future, ask)(timeout=seconds)
    assert not future.done()
    GATES[gate].set()
    assert future.result(30) == 8


def test_a_timeout_is_one_of_python_too(call, gate):
    future = call("w1", wait_then_double, gate, 4)

    with pytest.raises(TimeoutError):
        future.result(0)
    with pytest.raises(gw.DeadlinePassed):
        future.result(0)
    GATES[gate].set()
    assert torch.futures.wait_all([future]) == [8]  # completed though nobody has waited to the end


def test_waits_that_are_over_leave_no_callbacks(call, gate):
    future = call("w1", wait_then_double, gate, 4)
    before = len(future._promise._callbacks)

    for _ in range(5):
        with pytest.raises(gw.WaitTimeout):
            future.wait(0)
        gw.wait([future], timeout=0)
        with pytest.raises(gw.WaitTimeout):
            list(gw.as_completed([future], timeout=0))

    assert len(future._promise._callbacks) == before
    assert future._promise._waiters == []
    GATES[gate].set()
    future.wait()


@pytest.mark.parametrize("timeout", ["soon", float("nan"), torch.ones(2)], ids=repr)
def test_a_timeout_that_is_no_number_is_refused(call, timeout):
    future = call("w1", double, 1)

    with pytest.raises(ArgumentTypeError, match="is not a number of seconds"):
        future.wait(timeout)
    assert future.wait() == 2


def test_the_exception_of_a_cancelled_call_is_raised(call, gate):
    future = call("w1", wait_then_double, gate, 1)
    assert not future.cancelled()

    assert future.cancel()

    assert future.cancelled()
    with pytest.raises(gw.Cancelled):
        future.exception()


def test_an_exception_of_a_callback_that_was_asked_for_is_not_logged(call, caplog):
    future = call("w1", double, 1).then(lambda _: 1 / 0)

    assert isinstance(future.exception(), ZeroDivisionError)
    assert caplog.records == []


# -- its text


def test_a_future_says_what_it_is_and_how_long_it_takes(call, gate):
    future = call("w1", wait_then_double, gate, 1)
    chained = future.then(lambda f: f.wait())
    named = f"{HERE.__name__}.wait_then_double on w1"

    text = repr(future)
    assert text.startswith(f"<gradwire.Future: {named}, pending for ")
    assert text.endswith(" s>")
    of_callback = f"<gradwire.Future: w0: a callback of the future of {named}"
    assert repr(chained) == f"{of_callback}, pending>"
    GATES[gate].set()
    assert chained.wait() == 2
    assert repr(future) == f"<gradwire.Future: {named}, done>"
    assert repr(chained) == f"{of_callback}, done>"


def test_a_future_says_how_it_has_ended(call, gate):
    failed, cancelled = call("w1", fail), call("w1", wait_then_double, gate, 1)
    cancelled.cancel()
    failed.exception()

    assert repr(failed).endswith("fail on w1, failed>")
    assert repr(cancelled).endswith("on w1, cancelled>")


def test_a_future_that_follows_another_ends_as_that_one_does(call, workers):
    def failing(_):
        return gw.rpc_async("w2", fail)

    future = workers[0].run(lambda: gw.rpc_async("w1", double, args=(1,)).follow(failing))

    assert isinstance(future.exception(), KeyError)
    assert repr(future).endswith(", failed>")


# -- several


@pytest.mark.parametrize("peer", ["w1", "w2"])
def test_futures_come_in_the_order_in_which_they_are_done(call, gate, peer):
    late, early = call("w1", wait_then_double, gate, 1), call(peer, double, 2)

    done = gw.as_completed([late, early], timeout=30)

    assert next(done) is early
    GATES[gate].set()
    assert next(done) is late
    assert list(done) == []


def test_many_futures_of_many_workers_come_once_each(call):
    futures = [call(f"w{1 + n % 2}", double, n) for n in range(100)]

    done = list(gw.as_completed([*futures, futures[3]]))

    assert sorted(future.wait() for future in done) == [2 * n for n in range(100)]
    assert len(done) == 100


def test_a_future_that_fails_comes_as_the_others_do(call):
    (done,) = gw.as_completed([call("w1", fail)])

    assert isinstance(done.exception(), KeyError)


def test_futures_that_are_late_are_named_and_go_on(call, gate):
    early = call("w1", double, 1)
    late = [call("w2", wait_then_double, gate, n) for n in range(5)]
    early.wait()

    done = gw.as_completed([early, *late], timeout=SOON)
    assert next(done) is early
    with pytest.raises(gw.WaitTimeout, match=r"5 of 6 futures were not done in 0.01 s: <.*w2.*, …"):
        next(done)
    GATES[gate].set()
    assert sorted(future.wait() for future in gw.as_completed(late)) == [0, 2, 4, 6, 8]


def test_the_time_runs_from_the_call_of_as_completed(call, gate):
    future = call("w1", wait_then_double, gate, 1)
    done = gw.as_completed([future], timeout=0)
    GATES[gate].set()
    future.wait()

    assert list(done) == [future]  # it is done: no time is needed


def test_a_loop_that_ends_early_leaves_nothing(call, gate):
    late = call("w1", wait_then_double, gate, 1)
    before = len(late._promise._callbacks)

    for _ in gw.as_completed([call("w2", double, 1), late]):
        break

    assert eventually(lambda: len(late._promise._callbacks) == before)
    GATES[gate].set()
    late.wait()


def test_no_futures_are_done_at_once():
    assert list(gw.as_completed([])) == []
    assert gw.wait([]) == (set(), set())


def test_wait_waits_for_all(call, gate):
    early, late = call("w1", double, 1), call("w2", wait_then_double, gate, 1)
    with ThreadPoolExecutor(1) as threads:
        waited = threads.submit(gw.wait, [early, late])
        early.wait()
        GATES[gate].set()

        assert waited.result(30) == ({early, late}, set())


@pytest.mark.parametrize("when", [FIRST_COMPLETED, FIRST_EXCEPTION])
def test_wait_may_end_with_the_first(call, gate, when):
    early = call("w1", double if when == FIRST_COMPLETED else fail, *[1][: when == FIRST_COMPLETED])
    late = call("w2", wait_then_double, gate, 1)

    found = gw.wait([late, early], timeout=30, return_when=when)

    assert found == gw.Waited({early}, {late})
    GATES[gate].set()
    late.wait()


def test_a_value_or_a_cancelled_call_is_no_exception_to_wait_for(call, gate):
    """As with the futures of Python."""
    early, late, cancelled = (call("w1", wait_then_double, gate, n) for n in range(3))
    cancelled.cancel()

    found = gw.wait([early, late, cancelled], timeout=SOON, return_when=FIRST_EXCEPTION)

    assert found == ({cancelled}, {early, late})
    GATES[gate].set()
    assert gw.wait([early, late, cancelled], return_when=FIRST_EXCEPTION).not_done == set()


def test_futures_of_torch_may_be_among_them(call):
    mine, failed = torch.futures.Future(), torch.futures.Future()
    done = gw.as_completed([mine, call("w1", double, 4), failed], timeout=30)

    assert next(done).wait() == 8
    mine.set_result(1)
    assert next(done) is mine
    failed.set_exception(ValueError("no"))
    assert next(done) is failed


def test_futures_of_torch_alone_need_no_worker():
    mine, failed = torch.futures.Future(), torch.futures.Future()

    assert gw.wait([mine, failed], timeout=SOON) == (set(), {mine, failed})
    with pytest.raises(gw.WaitTimeout, match="2 of 2 futures"):
        next(gw.as_completed([mine, failed], timeout=SOON))
    failed.set_exception(ValueError("no"))
    assert gw.wait([mine, failed], return_when=FIRST_EXCEPTION) == ({failed}, {mine})
    mine.set_result(1)
    assert gw.wait([mine, failed]).not_done == set()


def test_what_is_no_future_is_refused(call):
    future = call("w1", double, 1)

    with pytest.raises(ArgumentTypeError, match="a int is no future"):
        gw.as_completed([1])
    with pytest.raises(ArgumentTypeError, match="a single future was given"):
        gw.wait(future)
    with pytest.raises(ArgumentTypeError, match="a Future is no future"):
        gw.wait([concurrent.futures.Future()])
    with pytest.raises(UsageError, match="return_when='all' is none of FIRST_COMPLETED"):
        gw.wait([future], return_when="all")
    assert gw.wait([future], return_when=ALL_COMPLETED).done == {future}


def test_a_called_function_may_wait_for_several(workers, gate):
    assert workers[0].run(gw.rpc_sync, "w1", first_done, args=(gate,)) == [4, 2]


def test_gradients_come_back_through_calls_in_any_order(workers):
    def learned():
        x = torch.tensor(3.0, requires_grad=True)
        futures = [gw.rpc_async(f"w{1 + n % 2}", double, args=(x,)) for n in range(6)]
        sum(future.result() for future in gw.as_completed(futures)).backward()
        return x.grad

    assert workers[0].run(learned) == 12


@pytest.mark.slow
def test_a_checkpoint_may_wait_for_several(workers):
    def block(x):
        futures = [gw.rpc_async(f"w{1 + n % 2}", double, args=(x,)) for n in range(4)]
        gw.wait(futures)
        return sum(future.result() for future in gw.as_completed(futures)) * torch.rand(())

    def learned():
        torch.manual_seed(0)
        x = torch.tensor(3.0, requires_grad=True)
        y = checkpoint(block, x, use_reentrant=False)
        y.backward()
        return x.grad, y.detach() / 3

    grad, factor = workers[0].run(learned)
    torch.testing.assert_close(grad, factor)
