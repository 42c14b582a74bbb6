"""The process whose forks are the workers of a run."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import pytest
import torch

import gradwire
from gradwire import PeerLost, UsageError
from gradwire.current import current_worker
from gradwire.launch import fork_server, processes
from gradwire.launch.fork_server import CannotFork, ForkServer, told
from gradwire.launch.processes import ProcessGroup
from tests.leftovers import eventually

pytestmark = [pytest.mark.slow, pytest.mark.processes]
SECONDS = 60.0


def about():
    """What a worker is, and what it draws before anybody has drawn."""
    drawn = random.random(), float(numpy.random.rand()), torch.rand(3)
    first = torch.equal(drawn[2], torch.rand(3, generator=torch.Generator().manual_seed(seed())))
    return os.getppid(), drawn[0], drawn[1], first, current_worker.is_forked, sys.stdin.read()


def seed():
    return torch.default_generator.initial_seed()


def compare():
    return [about(), *(gradwire.rpc_sync(f"w{n}", about) for n in (1, 2))]


def test_workers_are_forks_of_one_process_and_draw_their_own_numbers():
    found = gradwire.run(compare, 3, expose=[about])

    parents, drawn, by_numpy, are_torchs, are_forked, read = map(set, zip(*found, strict=True))
    assert len(parents - {os.getpid()}) == 1
    assert len(drawn) == len(by_numpy) == 3
    # torch's generator begins with the same seed in each new process.
    assert (are_torchs, are_forked, read) == ({True}, {False}, {""})
    assert not eventually(lambda: Path(f"/proc/{parents.pop()}").exists(), 0)


def test_spawned_workers_are_children_of_the_program():
    assert gradwire.run(os.getppid, 1, start_method="spawn") == os.getpid()


def test_an_unknown_method_is_refused():
    with pytest.raises(UsageError, match=r"'fork'\) is none of forkserver, spawn"):
        gradwire.run(compare, 3, start_method="fork")


def leave_traces(directory):
    """At the end of a process: a callback, and a thread that is no daemon."""
    atexit.register(Path(directory, "callback").touch)
    gate = threading.Event()
    threading.Thread(target=lambda: (gate.wait(SECONDS), Path(directory, "thread").touch())).start()
    atexit.register(gate.set)
    threading.Thread(target=gate.set).start()


def test_a_fork_ends_as_a_process_does(tmp_path):
    gradwire.run(leave_traces, 1, args=(str(tmp_path),))

    assert {path.name for path in tmp_path.iterdir()} == {"callback", "thread"}


executors = []


def keep_an_executor():
    executors.append(ThreadPoolExecutor(1))  # its idle thread is no daemon
    return executors[0].submit(os.getpid).result()


@pytest.mark.parametrize("method", processes.METHODS)
def test_an_executor_that_was_not_shut_down_keeps_no_worker_alive(method):
    assert gradwire.run(keep_an_executor, 1, timeout=SECONDS, start_method=method) != os.getpid()


PROGRAM = """
import ctypes, os, sys
import gradwire

if __name__ != "__main__":
    early = open(f"early.{os.environ['METHOD']}", "w")

class Kept:
    pass

def main():
    early.write("before the worker")
    Kept.late = open(f"late.{os.environ['METHOD']}", "wb")
    Kept.late.write(b"after")
    ctypes.CDLL(None).printf(b"by code in C\\n")

if __name__ == "__main__":
    gradwire.run(main, 1, start_method=os.environ["METHOD"])
"""


@pytest.mark.parametrize("method", processes.METHODS)
def test_what_is_in_a_buffer_at_the_end_is_written(tmp_path, method):
    (tmp_path / "program.py").write_text(PROGRAM)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=buffered | {"METHOD": method},
        capture_output=True,
        check=True,
        timeout=SECONDS,
    )

    assert done.stdout == b"by code in C\n"
    assert (tmp_path / f"early.{method}").read_text() == "before the worker"
    assert (tmp_path / f"late.{method}").read_text() == "after"


def resource_tracker_here():
    return os.fstat(resource_tracker.getfd()).st_ino


@pytest.mark.parametrize("method", processes.METHODS)
def test_the_resource_tracker_of_the_program_is_that_of_its_workers(method):
    found = gradwire.run(resource_tracker_here, 1, start_method=method)
    assert found == resource_tracker_here()


ORPHANED = """
import os, signal, threading
import gradwire

def main():
    print(os.getpid(), os.getppid(), flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: os.fork() or signal.pause())
    gradwire.run(main, 1)
"""


def test_workers_end_with_their_program_even_if_a_process_that_it_forked_lives_on(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(ORPHANED)
    with TemporaryDirectory() as directory:  # which nobody is left to empty; its name is short
        end_as_orphans(path, directory)


def end_as_orphans(path, directory):
    program = subprocess.Popen(
        [sys.executable, path],
        env=os.environ | {"TMPDIR": directory},
        stdout=subprocess.PIPE,
        process_group=0,
        text=True,
    )
    try:
        with program.stdout as output:
            worker, server = output.readline().split()
        program.send_signal(signal.SIGUSR1)
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        assert eventually(lambda: len(children.read_text().split()) == 2)
        program.kill()
        program.wait(SECONDS)
        for pid in (server, worker):
            assert eventually(lambda pid=pid: not is_running(pid), 10)
    finally:
        os.killpg(program.pid, signal.SIGKILL)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill_my_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait(SECONDS)


def test_workers_end_with_their_server():
    with pytest.raises(PeerLost, match=r"w[01] died \(exit status 255\) while it was at work"):
        gradwire.run(kill_my_parent, 2)


def kill_my_parent_once():
    if gradwire.incarnation() == 0:
        kill_my_parent()
    return gradwire.incarnation()


def test_workers_are_restarted_without_their_server():
    assert gradwire.run(kill_my_parent_once, 2, restarts=2, timeout=SECONDS) > 0


def parent():
    program = multiprocessing.parent_process()
    return program.name, program.pid, program.is_alive()


@pytest.mark.parametrize("method", processes.METHODS)
def test_to_multiprocessing_the_program_is_the_parent_of_its_workers(method):
    here = multiprocessing.current_process().name, os.getpid(), True
    assert gradwire.run(parent, 1, start_method=method) == here


THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


def test_workers_are_spawned_if_the_server_has_threads(tmp_path, monkeypatch, caplog):
    (tmp_path / "sitecustomize.py").write_text(THREAD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    with caplog.at_level(logging.INFO, "gradwire"):
        assert gradwire.run(os.getppid, 1) == os.getpid()

    assert "workers are spawned, not forked: something that the server imports" in caplog.text


def test_a_server_that_cannot_start_is_of_no_use(monkeypatch):
    monkeypatch.setattr(fork_server, "_PROGRAM", "raise SystemExit(3)")

    with pytest.raises(CannotFork, match="ended before it could import torch"):
        ForkServer(SECONDS)


@pytest.mark.parametrize("lacks", [AttributeError("pidfd_open"), OSError(38, "not implemented")])
def test_a_system_without_descriptors_of_processes_is_found_before_the_start(monkeypatch, lacks):
    def pidfd_open(_):
        raise lacks

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    monkeypatch.setattr(subprocess, "Popen", None)

    with pytest.raises(CannotFork, match=r"the system has no descriptors of processes: .*p"):
        ForkServer(SECONDS)


def test_what_python_ignores_on_its_path_does_no_harm(monkeypatch, capfd):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), 3])

    assert gradwire.run(os.getppid, 1) != os.getpid()
    assert capfd.readouterr().err == ""


def test_an_interrupt_at_the_start_leaves_no_server(monkeypatch):
    def interrupted(*args, **named):
        started.append(start(*args, **named))
        signal.raise_signal(signal.SIGINT)  # blocked for now
        return started[0]

    started, start = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)

    with pytest.raises(KeyboardInterrupt):
        ForkServer(SECONDS)
    assert started[0].returncode is not None


# -- without a run around it


def end_with(pipe, _parent, status):
    pipe.close()
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


def wait(pipe, *_):
    pipe.recv_bytes()  # nothing is sent: until the other end is closed


def statuses(group, count):
    found = {}
    while len(found) < count:
        found |= dict(group.events(SECONDS))
    return [found[n] for n in sorted(found)]


def test_each_process_tells_how_it_ended():
    with ProcessGroup("forkserver") as group:
        for status in (0, 7, -signal.SIGKILL):
            group.start("one", end_with, status)

        assert statuses(group, 3) == [0, 7, -signal.SIGKILL]


def fail_beside_a_thread(pipe, _):
    threading.Thread(target=pipe.poll, args=(SECONDS,)).start()  # until the other end is closed
    raise ValueError("told before the thread ends")


def test_an_error_is_shown_before_the_threads_of_the_process_have_ended(capfd):
    with ProcessGroup("forkserver") as group:
        group.start("one", fail_beside_a_thread)
        shown = []
        assert eventually(
            lambda: shown.append(capfd.readouterr().err) or "told before" in "".join(shown)
        )


def test_a_fork_that_is_told_nothing_says_nothing(capfd):
    server, (ours, theirs) = ForkServer(SECONDS), multiprocessing.Pipe()
    try:
        with theirs:
            process = server.fork("one", theirs, SECONDS)
        ours.close()  # as when Ctrl-C comes now
        process.join(SECONDS)
        assert process.exitcode == 1
        process.close()
    finally:
        server.stop()
    assert capfd.readouterr().err == ""


def test_a_program_without_room_for_more_descriptors_is_told_so():
    with ProcessGroup("forkserver") as group:
        group.start("one", wait)
        room = resource.getrlimit(resource.RLIMIT_NOFILE)
        pair = os.dup(0), os.dup(0)  # the lowest that are free: for the ends of a pipe
        for each in pair:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (pair[1] + 1, room[1]))
        try:
            with pytest.raises(OSError, match=r"two was forked: Too many open files"):
                group.start("two", wait)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, room)


def leave_slowly(pipe, _, place):
    with suppress(EOFError):
        pipe.recv_bytes()
    threading.Event().wait(0.2)
    Path(place).touch()


def test_a_server_lets_its_forks_clean_up_when_the_program_is_gone(tmp_path):
    server, (ours, theirs) = ForkServer(SECONDS), multiprocessing.Pipe()
    try:
        with theirs:
            process = server.fork("one", theirs, SECONDS)
        ours.send_bytes(told("one", leave_slowly, (tmp_path / "cleaned",)))
        ours.close()
    finally:
        server.stop()
    process.join(SECONDS)
    process.close()
    assert (tmp_path / "cleaned").exists()


def test_a_program_that_ignores_the_end_of_its_children_learns_how_they_ended():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with ProcessGroup("forkserver") as group:
            group.start("one", end_with, 7)
            assert statuses(group, 1) == [7]
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_one_after_the_other_is_forked_from_the_same_server():
    with ProcessGroup("forkserver") as group:
        for _ in range(3):
            group.start("one", end_with, 0)
            assert statuses(group, 1) == [0]
        server = group._server._process.pid

    assert not Path(f"/proc/{server}").exists()


def test_what_still_runs_is_killed_with_the_group(monkeypatch):
    monkeypatch.setattr(processes, "_TERM_SECONDS", 0.0)
    with ProcessGroup("forkserver") as group:
        pid = group.pid(group.start("one", wait))
        os.kill(pid, signal.SIGSTOP)  # it cannot end by itself

    assert not Path(f"/proc/{pid}").exists()
