"""The elastic pool: no call starves the call it waits for."""

from __future__ import annotations

import threading

import pytest

from gradwire import threads
from gradwire.agent.serving.thread_pool import ElasticPool
from tests.leftovers import eventually


@pytest.fixture
def make_pool():
    pools = []

    def make(limit=None):
        pools.append(ElasticPool("gradwire test", limit))
        return pools[-1]

    yield make
    for pool in pools:
        assert pool.close(5.0, drop_queued=True) == []


def run_and_wait(pool, job):
    done, result = threading.Event(), []

    def run():
        result.append(job())
        done.set()

    assert pool.submit(run)
    assert done.wait(10)
    return result[0]


def test_jobs_nest_deeper_than_the_limit_when_they_say_that_they_wait(make_pool):
    pool = make_pool(2)

    def nested(depth):
        if depth == 0:
            return 0
        with pool.waiting():
            return run_and_wait(pool, lambda: nested(depth - 1)) + 1

    assert run_and_wait(pool, lambda: nested(20)) == 20


def test_no_more_jobs_compute_at_once_than_the_limit(make_pool):
    pool, lock, gate = make_pool(3), threading.Lock(), threading.Semaphore(0)
    running, most, done = [0], [0], threading.Semaphore(0)

    def job():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        gate.acquire()
        with lock:
            running[0] -= 1
        done.release()

    for _ in range(10):
        pool.submit(job)
    for _ in range(10):
        gate.release()
    for _ in range(10):
        assert done.acquire(timeout=10)
    assert most[0] <= 3


def test_an_idle_thread_is_used_again(make_pool):
    pool = make_pool()
    names = {run_and_wait(pool, lambda: threading.current_thread().name) for _ in range(5)}

    assert len(names) <= 2  # the first may not be back when the second is asked for


def test_waiting_on_a_thread_of_ones_own_changes_nothing(make_pool):
    pool = make_pool(1)
    with pool.waiting():
        assert run_and_wait(pool, lambda: "ran") == "ran"


def test_a_closed_pool_refuses_or_runs_on_the_spot():
    pool = ElasticPool("gradwire test")
    pool.close(1.0, drop_queued=True)
    here = []

    assert pool.submit(lambda: here.append("submitted")) is False
    pool.submit_or_run(lambda: here.append(threading.current_thread()))

    assert here == [threading.current_thread()]


def test_closing_finishes_what_is_queued_unless_told_to_drop_it():
    for drop, expected in [(False, ["queued"]), (True, [])]:
        pool, ran = ElasticPool("gradwire test", 1), []
        gate, began = threading.Event(), threading.Event()
        pool.submit(lambda began=began, gate=gate: (began.set(), gate.wait(10)))
        assert began.wait(10)
        pool.submit(lambda ran=ran: ran.append("queued"))
        closer = threading.Thread(target=pool.close, args=(10.0,), kwargs={"drop_queued": drop})
        closer.start()
        while pool.submit(lambda: None):  # until close() has taken hold
            pass
        gate.set()
        closer.join(10)
        assert [job for job in ran if job == "queued"] == expected


def test_a_thread_that_does_not_end_is_named():
    pool, gate, began = ElasticPool("gradwire test"), threading.Event(), threading.Event()
    pool.submit(lambda: (began.set(), gate.wait(10)))
    assert began.wait(10)

    assert pool.close(0.01, drop_queued=True) == ["gradwire test 0"]
    gate.set()
    assert pool.close(10.0, drop_queued=True) == []


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_job_that_raises_leaves_the_pool_working(make_pool, caplog, error):
    pool = make_pool(1)

    def fail():
        raise error("of the job's own")

    for _ in range(3):
        pool.submit(fail)

    assert run_and_wait(pool, lambda: "ran") == "ran"
    assert eventually(lambda: pool.active == 0)
    said = [(record.getMessage(), record.exc_info[0]) for record in caplog.records]
    assert said == [("gradwire test: a job failed", error)] * 3


def test_a_backlog_does_not_start_more_threads_than_the_limit_allows(make_pool):
    pool, gate, most = make_pool(4), threading.Event(), []

    def job():
        gate.wait(10)
        names = [thread.name for thread in threading.enumerate()]
        most.append(sum(name.startswith("gradwire test") for name in names))

    for _ in range(200):
        pool.submit(job)
    gate.set()

    assert eventually(lambda: len(most) == 200)
    assert max(most) <= 4


def test_a_thread_that_is_interrupted_between_two_jobs_is_replaced():
    """A finalizer runs on an idle thread, and waits for what another job brings."""
    pool = ElasticPool("test")
    came, gone = threading.Event(), threading.Event()
    wait = pool._changed.wait
    interrupted, armed = [], []

    def wait_interrupted(seconds):
        woken = wait(seconds)
        if (
            woken and armed and not interrupted
        ):  # as the collector would, before the lock is taken again
            interrupted.append(threading.current_thread())
            pool.lock.release()
            undo = threads.mine.duty.hand_over(None)
            assert came.wait(10)
            undo()
            pool.lock.acquire()
            gone.set()
        return woken

    try:
        pool._changed.wait = wait_interrupted
        pool.submit(lambda: None)
        eventually(lambda: pool.active == 0)
        armed.append(True)
        pool.submit(came.set)

        assert gone.wait(10)
    finally:
        assert pool.close(5, drop_queued=False) == []
    assert interrupted
