"""Threads that start, and what may interrupt them."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from gradwire import threads
from gradwire.errors import UsageError


class Cycle:
    """Calls back when the collector finds it."""

    def __init__(self, call):
        self.itself, self.call = self, call

    def __del__(self):
        self.call()


@pytest.fixture
def busy_collector():
    """It runs at nearly every step."""
    before = gc.get_threshold()
    gc.freeze()  # not all that earlier tests have made
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_no_finalizer_runs_on_a_new_thread_before_it_knows_its_duty(busy_collector):
    duty = object()
    found, ended = [], []

    for n in range(50):
        Cycle(lambda n=n: ended.append(n))
        seen = []

        def note(seen=seen):
            mine = threading.current_thread().name
            if mine.startswith("gradwire"):
                seen.append(threads.mine.duty)

        def work(note=note):
            Cycle(note)
            [[] for _ in range(100)]  # enough for the collector

        thread = threads.thread(f"gradwire test {n}", work, duty)
        Cycle(note)  # may die while the thread starts
        thread.start()
        thread.join()
        found += seen

    assert set(map(id, found)) == {id(duty)}
    assert gc.isenabled()


def test_the_collector_stays_off_if_it_was():
    gc.disable()
    try:
        thread = threads.thread("gradwire test", lambda: None)
        thread.start()
        thread.join()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_goes_on_if_there_is_no_thread_to_be_had(monkeypatch):
    def none_left(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "_start_new_thread", none_left, raising=False)
    monkeypatch.setattr(threading, "_start_joinable_thread", none_left, raising=False)

    with pytest.raises(RuntimeError):
        threads.thread("gradwire test", lambda: None).start()

    assert gc.isenabled()


def test_many_threads_that_start_at_once_leave_the_collector_on():
    go = threading.Event()

    def starter():
        go.wait(10)
        for n in range(50):
            thread = threads.thread(f"gradwire test {n}", lambda: None)
            thread.start()
            thread.join()

    starters = [threading.Thread(target=starter) for _ in range(8)]
    for thread in starters:
        thread.start()
    go.set()
    for thread in starters:
        thread.join()

    assert gc.isenabled()


def test_a_process_that_is_forked_while_a_thread_starts_collects():
    threads._collector.pause()
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        threads._collector.resume()
    assert gc.isenabled()


def test_a_worker_needs_the_global_interpreter_lock(monkeypatch):
    threads.check_gil()
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(UsageError, match="interpreter lock, which is off"):
        threads.check_gil()
