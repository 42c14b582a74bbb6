"""Every way to leave ends by its deadline, says whom it gave up on, and leaves nothing."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

import gradwire
from gradwire import DeadlinePassed, Options, PeerLost, Timeouts, UsageError
from tests.injection.processes import freeze
from tests.leftovers import eventually
from tests.process_cluster import process_cluster
from tests.processes import far

TIMEOUTS = Timeouts(join=60, call=60, backward=60, shutdown=60)


def held() -> dict[str, object]:
    """What a worker could leave behind in this process and beside it."""
    gc.collect()
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}").split(":")[0])
        except FileNotFoundError:  # the listing itself
            continue
    names = [thread.name for thread in threading.enumerate()]
    return {
        "threads": sorted(name for name in names if name.startswith("gradwire ")),
        "sockets": links.count("socket"),
        "shared": links.count("/memfd"),
        "mapped": far.shared_blocks(),
    }


@pytest.fixture
def clean(hosts):
    """Workers, and afterwards nothing more is held than before."""
    hosts.start()
    before = held()
    options = Options(listen="unix", timeouts=TIMEOUTS)
    with process_cluster(3, expose=[far], options=options, hosts=hosts) as others:
        gradwire.rpc_sync("w1", far.same, args=(torch.ones(1 << 20),))  # by shared memory
        yield others
        far.forget()
    hosts.start()
    assert eventually(lambda: held() == before), (held(), before)


def _blocked(pool):
    waiting = pool.submit(gradwire.rpc_sync, "w1", far.block_here)
    gradwire.rpc_sync("w1", far.wait_until_it_blocks)
    return waiting


@pytest.mark.parametrize("graceful", [True, False])
def test_with_calls_open(clean, graceful):
    with ThreadPoolExecutor(1) as pool:
        waiting = _blocked(pool)
        if graceful:
            with pytest.raises(DeadlinePassed, match="w0 shut down without w1"):
                gradwire.shutdown(timeout=0.5)
        else:
            gradwire.shutdown(graceful=False)
        with pytest.raises(PeerLost, match="w0 shut down before an answer came") as lost:
            waiting.result(30)

    assert lost.value.phase == "shutdown"
    lost.value.with_traceback(None)


def test_from_two_threads_at_once_and_once_more(clean):
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(gradwire.shutdown) for _ in range(2)]
        outcomes = [done.exception(60) for done in both]

    assert all(error is None or isinstance(error, UsageError) for error in outcomes)
    with pytest.raises(UsageError, match="RPC has not been initialized"):
        gradwire.shutdown()


@pytest.mark.parametrize("graceful", [True, False])
def test_from_a_signal_handler_that_interrupts_a_call(clean, graceful):
    main = threading.main_thread().ident

    def leave(*_):
        with suppress(DeadlinePassed):  # of the call that it interrupts
            gradwire.shutdown(graceful=graceful, timeout=0.5)

    def interrupt():
        gradwire.rpc_sync("w1", far.wait_until_it_blocks)
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            with pytest.raises(PeerLost, match="w0 shut down"):
                gradwire.rpc_sync("w1", far.block_here)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_with_an_interrupt_in_the_middle_of_it(clean):
    main = threading.main_thread().ident

    def interrupt():
        assert eventually(lambda: "leave" in _functions_of(main))
        signal.pthread_kill(main, signal.SIGINT)

    with ThreadPoolExecutor(2) as pool:
        waiting = _blocked(pool)
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            gradwire.shutdown()
        with pytest.raises(PeerLost):
            waiting.result(30)


def _functions_of(thread: int) -> set[str]:
    names, frame = set(), sys._current_frames()[thread]
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def test_with_a_dead_and_a_frozen_worker(clean):
    gradwire.rpc_sync("w2", far.here)
    clean["w1"].kill()
    freeze(clean["w2"])
    try:
        with pytest.raises(DeadlinePassed, match="w0 shut down without w2, which did not"):
            gradwire.shutdown(timeout=0.5)
    finally:
        os.kill(clean["w2"].pid, signal.SIGCONT)


def test_by_a_kill_that_leaves_a_directory_which_the_next_one_removes(tmp_path, monkeypatch):
    """The socket of a worker that found its own place for it."""
    from gradwire.transport.unix import UnixTransport

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    child = os.fork()
    if child == 0:
        UnixTransport().listen("unix://")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert eventually(lambda: len(os.listdir(tmp_path)) == 1)
    (left,) = os.listdir(tmp_path)
    os.utime(tmp_path / left, (0, 0))

    alive = UnixTransport().listen("unix://")
    assert left not in os.listdir(tmp_path)
    again = UnixTransport().listen("unix://")
    assert len(os.listdir(tmp_path)) == 2
    alive.close()
    again.close()
    assert os.listdir(tmp_path) == []
