"""What is done in the wrong moment, too late or too large is refused or survived, and said."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

import gradwire as gw
from gradwire.errors import CallTimeout, NotSerializable, PeerLost, RemoteError, UsageError
from gradwire.options import Limits, Options, Timeouts
from gradwire.rpc.refs.handles_state import Verdict
from gradwire.testing import cluster
from gradwire.testing.clock import ManualClock
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
CLOCKS: dict[str, ManualClock] = {}
WORKERS: dict[str, Any] = {}
"""The worker of each name, for a served function that does what it should not."""


@pytest.fixture
def workers():
    with cluster(4, expose=[HERE]) as made:
        WORKERS.update({member.name: member.worker for member in made})
        yield made
        WORKERS.clear()
        assert_nothing_left(made)


# -- what runs on the workers


class HasMessage(Exception):
    """Exposed, and cannot be made again: what we write there is its own to say."""

    @property
    def message(self):
        return "read only"


class Unprintable(Exception):
    def __str__(self):
        raise LookupError("no text")


RAISED = {
    "a property of its own": lambda: HasMessage("bad"),
    "no text": lambda: Unprintable(),
    "no unicode": lambda: ValueError("caf\udce9"),
}


def name():
    return gw.get_worker_info().name


def same(value):
    return value


def fail(kind):
    raise RAISED[kind]()


def wait_for(gate):
    GATES[gate].wait(30)
    return gate


def fetched(reference):
    return reference.to_here()


def ends_fetched(references):
    return references[0].to_here(), references[-1].to_here()


def pass_on(reference, seconds):
    return gw.rpc_sync("w0", same, args=(reference,), timeout=seconds)


def leave():
    WORKERS[name()].shutdown(graceful=True)


def call_too_late(clock):
    CLOCKS[clock].advance(60)
    try:
        gw.rpc_sync("w0", name)
    except CallTimeout as error:
        WORKERS["said"] = error.message


class Released:
    """A handle of something on w1, which is told when the handle dies."""

    def __del__(self):
        gw.rpc_sync("w1", same, args=([gw.RRef("of the finalizer")],))


@dataclass
class Interrupted:
    """Something is finalized just while its field is read to be packed."""

    reference: Any

    def __getattribute__(self, attribute):
        if attribute == "reference":
            Released()
        return super().__getattribute__(attribute)


# -- errors of any kind


@pytest.mark.parametrize("kind", RAISED)
def test_an_error_that_is_hard_to_tell_is_told_and_the_next_call_is_served(workers, kind):
    for _ in range(2):
        with pytest.raises((RemoteError, ValueError), match="on w1: "):
            workers[0].run(gw.rpc_sync, "w1", fail, args=(kind,), timeout=10)

    assert workers[0].run(gw.rpc_sync, "w1", name, timeout=10) == "w1"


# -- futures of a worker that closes


def test_what_was_to_follow_a_call_follows_though_the_worker_closes(gate):
    with cluster(2, expose=[HERE], options=Options(threads=1)) as workers:
        busy = workers[1].run(gw.rpc_async, "w0", wait_for, args=(gate,))
        assert eventually(lambda: workers[0].worker.agent.dispatch.user.active == 1)
        future = workers[0].run(gw.rpc_async, "w1", same, args=(20,))
        assert future.wait() == 20
        following = future.then(lambda done: done.wait() + 1)
        with ThreadPoolExecutor(1) as threads:
            closed = threads.submit(workers[0].worker.close)
            settled = eventually(following.done) and eventually(busy.done)
            GATES[gate].set()
            closed.result(10)

        assert settled
        assert following.wait() == 21
        with pytest.raises(PeerLost):
            busy.wait()


def test_what_was_to_follow_a_call_that_is_given_up_gets_its_error(gate):
    with cluster(2, expose=[HERE]) as workers:
        future = workers[0].run(gw.rpc_async, "w1", wait_for, args=(gate,))
        following = future.then(lambda done: done.wait())
        workers[0].worker.close()
        later = future.then(lambda done: "nobody is left to run this")
        GATES[gate].set()

        assert eventually(following.done)
        with pytest.raises(PeerLost, match="w0 shut down before an answer came"):
            following.wait()
        assert later.wait() == "nobody is left to run this"


# -- a finalizer in the middle of packing


def test_a_finalizer_may_make_a_call_in_the_middle_of_packing(workers):
    def program():
        one, two = gw.RRef(1), gw.RRef(2)
        assert gw.rpc_sync("w1", ends_fetched, args=([one, Interrupted(one), two],)) == (1, 2)

    workers[0].run(program)


# -- sizes


@pytest.fixture
def narrow():
    limits = Limits(head=1 << 14, payload=1 << 14)
    with cluster(2, expose=[HERE], options=Options(limits=limits)) as made:
        yield made
        assert_nothing_left(made)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(1 << 13), r"over the limits of 16384 and 16384"),
        ("x" * (1 << 14), r"\d+ bytes besides tensors are over the limit of 16384"),
        ([torch.zeros(()) for _ in range(2000)], r"over the limits of 16384 and 16384"),
    ],
    ids=["tensors", "text", "headers"],
)
def test_what_is_over_the_limits_does_not_leave_and_the_connection_stays(narrow, gate, value, text):
    waiting = narrow[0].run(gw.rpc_async, "w1", wait_for, args=(gate,))
    with pytest.raises(NotSerializable, match=text) as refused:
        narrow[0].run(gw.rpc_sync, "w1", same, args=(value,))
    GATES[gate].set()

    assert not isinstance(refused.value, RemoteError)
    assert waiting.wait() == gate


def large(n):
    return torch.zeros(n)


def test_an_answer_over_the_limits_is_an_error_and_the_connection_stays(narrow, gate):
    waiting = narrow[0].run(gw.rpc_async, "w1", wait_for, args=(gate,))
    with pytest.raises(
        NotSerializable, match=r"NotSerializable on w1: a Result of .* is over the lim"
    ):
        narrow[0].run(gw.rpc_sync, "w1", large, args=(1 << 13,))
    GATES[gate].set()

    assert waiting.wait() == gate


@pytest.mark.parametrize("field", ["head", "payload", "depth"])
def test_limits_that_let_nothing_pass_are_refused(field):
    with pytest.raises(UsageError, match=f"limit {field}=0 is not a positive number"):
        Limits(**{field: 0})


@pytest.mark.parametrize("threads", [0, -1])
def test_a_worker_without_threads_is_refused(threads):
    with pytest.raises(UsageError, match=f"threads={threads} would run no call"):
        Options(threads=threads)


# -- references


def test_a_fetch_of_what_was_forgotten_says_so(workers):
    reference = workers[0].run(gw.remote, "w1", same, args=(1,))
    assert reference.to_here() == 1
    handle = reference.handle
    del reference
    assert_nothing_left(workers)
    worker = workers[0].worker

    with pytest.raises(UsageError, match=rf"{handle.ref} is not kept on w1 any more"):
        worker.calls.fetch(handle, worker.deadline(10))


def own_square():
    return (torch.ones(2, requires_grad=True) ** 2).sum()


@pytest.mark.parametrize("use", ["to_here", "backward"])
def test_a_value_may_be_used_before_the_call_that_makes_it_is_served(workers, monkeypatch, use):
    refs, arrives = workers[1].worker.refs, threading.Event()
    arrived = refs.creation_arrived

    def arrived_late(*creation):
        assert arrives.wait(30)
        return arrived(*creation)

    monkeypatch.setattr(refs, "creation_arrived", arrived_late)

    def program():
        with gw.context() as context, ThreadPoolExecutor(1) as pool:
            reference = gw.remote("w1", own_square)
            pool.submit(lambda: eventually(used.is_set, 0.2) or arrives.set())
            reference.to_here() if use == "to_here" else reference.backward(context)
            used.set()
        return arrives.is_set()

    used = threading.Event()
    assert workers[0].run(program)


def test_one_who_does_not_read_does_not_hold_up_the_others(workers, gate, monkeypatch):
    owner, reads = workers[1].worker, threading.Event()
    answer = owner.agent.answer

    def answer_when_it_reads(source, *message, **how):
        return (source.worker != 2 or reads.wait(30)) and answer(source, *message, **how)

    def askers():
        return len(owner.refs.content(reference.handle.ref)._callbacks)

    reference = workers[0].run(gw.remote, "w1", wait_for, args=(gate,))
    assert eventually(reference.confirmed_by_owner)
    first = workers[0].run(gw.rpc_async, "w2", fetched, args=(reference,))
    assert eventually(lambda: askers() == 1)
    second = workers[0].run(gw.rpc_async, "w3", fetched, args=(reference,))
    assert eventually(lambda: askers() == 2)
    monkeypatch.setattr(owner.agent, "answer", answer_when_it_reads)
    GATES[gate].set()
    done = eventually(second.done)
    reads.set()

    assert done
    assert first.wait() == second.wait() == gate


def test_packing_waits_no_longer_than_the_call_may_take(workers, monkeypatch):
    with monkeypatch.context() as patch:
        owned = workers[1].worker.refs._table.owned
        patch.setattr(owned, "fork_arrived", lambda *_: Verdict.NOT_YET)
        reference = workers[0].run(gw.remote, "w1", same, args=(1,))
        passed_on = workers[0].run(gw.rpc_async, "w2", pass_on, args=(reference, 0.01))
        assert eventually(passed_on.done)

    text = rf"CallTimeout on w2: w1 did not count \S+ of {reference.handle.ref} in time"
    with pytest.raises(CallTimeout, match=text):
        passed_on.wait()


# -- the wrong moment


def test_a_served_function_may_not_shut_its_own_worker_down(workers):
    text = r"shutdown\(\) was called on w1 by a function that a peer called\n.*let the function"
    with pytest.raises(UsageError, match=text):
        workers[0].run(gw.rpc_sync, "w1", leave, timeout=10)

    assert workers[0].run(gw.rpc_sync, "w1", name) == "w1"


def test_a_call_made_after_the_deadline_of_its_own_call_does_not_leave():
    clock = CLOCKS["late"] = ManualClock()
    options = Options(timeouts=Timeouts(call=600))
    with cluster(2, expose=[HERE], options=options, clock=clock) as workers:
        with workers.trace() as lines:
            call = workers[0].run(gw.rpc_async, "w1", call_too_late, args=("late",), timeout=30)
            assert eventually(lambda: "said" in WORKERS)
            assert eventually(call.done)
        assert_nothing_left(workers)

    text = "the deadline of the enclosing call has passed"
    assert WORKERS.pop("said") == text
    assert not any(line.startswith("w1>w0 call") for line in lines)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads: we know
def test_a_forked_child_is_told_that_it_is_no_worker(workers):
    there, here = os.pipe()
    with workers[0].worker.scope():
        child = os.fork()
        if child == 0:  # only the lookup of the current worker runs in it
            try:
                os.write(here, _what_the_door_says().encode())
            finally:
                os._exit(0)
    os.close(here)
    with os.fdopen(there, "rb") as pipe:
        heard, _, _ = select.select([pipe], [], [], 10)
        said = pipe.read().decode() if heard else ""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    assert said == "this process was forked from a worker, whose threads and connections it lacks"
    assert workers[0].run(gw.rpc_sync, "w1", name) == "w1"


def _what_the_door_says():
    try:
        gw.get_worker_info()
    except UsageError as error:
        return error.message
    return "welcome"


class UnprintableByExit(Exception):
    def __str__(self):
        raise SystemExit("no")


def raises_what_cannot_be_described():
    raise UnprintableByExit


@pytest.mark.parametrize("how", ["sync", "async", "remote"])
def test_an_error_that_cannot_be_described_is_answered(how):
    with cluster(2, expose=[raises_what_cannot_be_described]) as workers:

        def program():
            function = raises_what_cannot_be_described
            if how == "sync":
                return gw.rpc_sync("w1", function, timeout=5)
            if how == "async":
                return gw.rpc_async("w1", function, timeout=5).wait()
            return gw.remote("w1", function, timeout=5).to_here(timeout=5)

        with pytest.raises(RemoteError, match="cannot be described: to print it raised SystemExit"):
            workers[0].run(program)


@pytest.mark.parametrize(
    "number", [numpy.float64(5), numpy.float32(5), numpy.int64(5), torch.tensor(5.0)]
)
def test_a_timeout_may_be_any_number(number):
    options = Options(timeouts=Timeouts(call=number))
    with cluster(2, options=options) as workers:
        for call in (gw.rpc_sync, gw.rpc_async):
            workers[0].run(call, "w1", torch.neg, (torch.ones(2),), timeout=number)
        got = workers[0].run(gw.rpc_sync, "w1", torch.neg, (torch.ones(2),))

    assert torch.equal(got, -torch.ones(2))


@pytest.mark.parametrize("timeout", ["x", [1.0], object()])
def test_a_timeout_that_is_no_number_is_refused(timeout):
    with (
        cluster(2) as workers,
        pytest.raises(UsageError, match="is not a number of seconds"),
    ):
        workers[0].run(gw.rpc_sync, "w1", torch.neg, (torch.ones(2),), timeout=timeout)


def test_calls_to_oneself_need_no_connection():
    options = Options(limits=Limits(connections=1))
    with cluster(2, options=options) as workers:
        for name in ("w0", "w1"):
            got = workers[0].run(gw.rpc_sync, name, torch.neg, (torch.ones(2),))
            assert torch.equal(got, -torch.ones(2))
