"""Calls that finalizers and signal handlers make, in the middle of whatever their thread does."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
from collections import Counter

import pytest
import torch

import gradwire
from tests.leftovers import eventually
from tests.processes import far

REFUSED = "a finalizer or a signal handler"


class Calls:
    """In a cycle, so that only the collector finds it, in the middle of some allocation.

    The collector may run on any thread. On one that others need, the call is refused: `elsewhere`.
    """

    made = elsewhere = 0
    refused: list[str] = []  # noqa: RUF012
    errors: list[BaseException] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.itself = self

    @classmethod
    def ended(cls) -> int:
        return cls.made + cls.elsewhere + len(cls.refused) + len(cls.errors)

    def __del__(self) -> None:
        try:
            assert gradwire.rpc_sync("w1", far.add, args=(1, 2), timeout=20) == 3
            Calls.made += 1
        except BaseException as error:
            is_refused = isinstance(error, gradwire.UsageError) and REFUSED in str(error)
            if is_refused and threading.current_thread() is not threading.main_thread():
                Calls.elsewhere += 1
            elif is_refused:
                Calls.refused.append(error.message)
            else:
                Calls.errors.append(error)


@pytest.fixture
def often():
    """The collector runs at almost every allocation, and looks only at what is made from now on.

    With all that earlier tests have imported, the process would do nothing else for seconds.
    """
    before = gc.get_threshold()
    Calls.made, Calls.elsewhere, Calls.refused, Calls.errors = 0, 0, [], []
    gc.freeze()
    gc.set_threshold(3)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    Calls.errors.clear()


def test_finalizers_that_call_while_their_thread_reads(linked, often):
    for n in range(60):
        Calls()
        assert gradwire.rpc_sync("w1", far.add, args=(n, 1), timeout=20) == n + 1
    # A collection does nothing while another thread collects, and waits in a finalizer.
    assert eventually(lambda: gc.collect() >= 0 and Calls.ended() >= 60)
    assert Calls.errors == []
    assert len(Calls.refused) < Calls.made / 3, Counter(Calls.refused)


@pytest.fixture
def signalled():
    """A handler that calls w1 or w2 at each signal, of which many come while a test runs."""
    seen: list[object] = []
    workers = itertools.cycle(["w1", "w2"])
    main, is_over, is_free = threading.main_thread().ident, threading.Event(), threading.Event()
    is_free.set()

    def handle(*_):
        try:
            seen.append(gradwire.rpc_sync(next(workers), far.add, args=(1, 2), timeout=20))
        except BaseException as error:
            seen.append(error)
        is_free.set()

    def send():
        while not is_over.is_set():
            if is_free.wait(0.1):  # one after the other: else handlers would interrupt handlers
                is_free.clear()
                is_over.wait(0.002)
                signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    sender = threading.Thread(target=send)
    sender.start()
    yield seen
    is_over.set()
    sender.join()
    signal.signal(signal.SIGUSR1, before)


def test_signal_handlers_that_call_while_their_thread_reads_and_sends(linked, signalled):
    """Small messages, and large ones that fill the socket, or go by shared memory."""
    large = torch.ones(1 << 20)
    for n in range(100):
        assert gradwire.rpc_sync("w1", far.add, args=(n, 1), timeout=20) == n + 1
        if n % 5 == 0:
            (same,) = gradwire.rpc_sync("w1", far.same, args=(large,), timeout=20)
            assert (same == 1).all()
    seen = list(signalled)
    refused = [error for error in seen if REFUSED in str(error)]
    assert [value for value in seen if value != 3 and value not in refused] == []
    assert all(isinstance(error, gradwire.UsageError) for error in refused)
    assert len(seen) - len(refused) > 3
    assert len(refused) < len(seen) / 3


def test_a_handler_waits_for_a_call_that_was_made_before(workers):
    """Its answer comes by the line that the interrupted thread reads."""
    seen: list[object] = []
    gradwire.rpc_sync("w1", far.close_gate)
    earlier = gradwire.rpc_async("w1", far.wait_at_gate, timeout=30)

    def handle(*_):
        opening = gradwire.rpc_async("w1", far.open_gate, timeout=30)
        seen.append((earlier.wait(), opening.wait()))

    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, args=(main, signal.SIGUSR1))
    timer.start()
    try:
        gradwire.rpc_sync("w1", far.wait_at_gate, timeout=30)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert seen == [(None, None)]
