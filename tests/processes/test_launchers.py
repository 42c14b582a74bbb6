"""Programs that torchrun starts, unchanged, and those that `gradwire run` starts."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
LIMIT = 100

pytestmark = pytest.mark.usefixtures("no_secret")

PROGRAM = """
import os, signal, sys, threading
import torch
import gradwire as gw
from gradwire.agent.peers.secret import SignedStore

RESTART, RANK = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), os.environ.get("RANK")

def square(x):
    return x * x

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def die_in(name, key):
    plain = getattr(SignedStore, name)
    def dying(self, where, *rest):
        found = plain(self, where, *rest)
        if where.endswith(key):
            die()
        return found
    setattr(SignedStore, name, dying)

def main(what):
    x = torch.ones(3, requires_grad=True)
    gw.rpc_sync("w1", square, args=(gw.rpc_sync("w2", square, args=(x,)),)).sum().backward()
    if what == "raises":
        raise ValueError("the loss is infinite")
    if what == "waits":
        print("up", flush=True)
        threading.Event().wait()
    if what == "lost":
        gw.rpc_sync("w2", die)
    print("gradient", x.grad.tolist(), "restart", RESTART, flush=True)
    return "the value"

if __name__ == "__main__":
    what = sys.argv[1]
    if RESTART == 0 and RANK == "2":
        match what:
            case "import": die()
            case "claim": die_in("add", "/claimed/2")
            case "entry": die_in("set", "/2")
    value = gw.run(main, args=(what,), options=gw.Options(timeouts=gw.Timeouts(join=60)))
    print("returned", value, flush=True)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def processes_of(directory):
    """The ids of the processes that run a program in this directory."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if os.fsencode(directory) in command.read_bytes():
                found.append(int(command.parent.name))
    return found


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path):
    yield
    assert processes_of(tmp_path) == []


def finished(command, **environment):
    """The program's exit status, and what it and its launcher have printed."""
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def torchrun(program, what, *options, workers=3):
    return finished([*TORCHRUN, f"--nproc-per-node={workers}", *options, str(program), what])


def test_processes_of_torchrun_take_their_places(program):
    status, printed, errors = torchrun(program, "nothing")

    assert status == 0, errors
    assert sorted(printed.splitlines()) == [
        "gradient [4.0, 4.0, 4.0] restart 0",
        *["returned None"] * 2,
        "returned the value",
    ]


def test_the_summary_of_torchrun_shows_the_error_of_the_function(program):
    status, printed, errors = torchrun(program, "raises")

    assert status == 1
    assert "returned" not in printed
    summary = errors[errors.index("Root Cause") :]
    assert "rank      : 0" in summary
    assert "ValueError: the loss is infinite" in summary


def test_the_error_of_a_forked_process_is_not_that_of_the_job(tmp_path):
    program = tmp_path / "forks.py"
    program.write_text(
        "import os\nimport gradwire\n\n"
        "def main():\n    child = os.fork()\n    if not child:\n        raise ValueError\n"
        "    os.waitpid(child, 0)\n\n"
        'if __name__ == "__main__":\n    gradwire.run(main)\n'
    )
    recorded = tmp_path / "error.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    status, _, errors = finished(
        [sys.executable, str(program)],
        **place,
        GRADWIRE_LAUNCHER="env",
        TORCHELASTIC_ERROR_FILE=str(recorded),
    )

    assert status == 0, errors
    assert "ValueError" in errors  # of the fork, which prints it
    assert not recorded.exists()


def test_a_worker_that_is_killed_ends_the_job_and_is_named(program):
    status, _, errors = torchrun(program, "lost")

    assert status == 1
    assert "PeerLost: w2" in errors


@pytest.mark.parametrize("died_in", ["import", "claim", "entry"])
def test_restarted_processes_meet_though_the_store_was_kept(program, died_in):
    status, printed, errors = torchrun(program, died_in, "--max-restarts=2")

    assert status == 0, errors
    assert "gradient [4.0, 4.0, 4.0] restart 1" in printed


def test_nothing_is_left_when_the_agent_of_torchrun_is_killed(program, tmp_path):
    command = [*TORCHRUN, "--nproc-per-node=3", str(program), "waits"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as agent:
        assert agent.stdout.readline() == "up\n", agent.stderr.read()
        workers = [os.pidfd_open(pid) for pid in processes_of(tmp_path) if pid != agent.pid]
        assert len(workers) == 3
        agent.send_signal(signal.SIGKILL)
        for worker in workers:
            assert select.select([worker], [], [], LIMIT)[0]
            os.close(worker)


def test_another_rendezvous_under_torchrun_is_refused_at_once(program):
    text = PROGRAM.replace("gw.Options(", 'gw.Options(init_method="tcp://127.0.0.1:1", ')
    program.write_text(text)
    began = time.monotonic()

    status, _, errors = torchrun(program, "nothing", workers=2)

    assert status == 1
    assert time.monotonic() - began < 50  # Timeouts(join=60)
    assert "no rendezvous at tcp://127.0.0.1:1: processes of torchrun host no store" in errors


def test_gradwire_run_starts_the_workers_of_a_program(program):
    command = [sys.executable, "-m", "gradwire", "run", "-n", "3", str(program), "nothing"]

    status, printed, errors = finished(command)

    assert (status, errors) == (0, "")
    assert printed == "gradient [4.0, 4.0, 4.0] restart 0\nreturned the value\n"


def test_a_program_that_nobody_gave_workers_says_how(program):
    status, _, errors = finished([sys.executable, str(program), "nothing"])

    assert status == 1
    assert "run() was given no world_size, and no launcher has started this process" in errors
    for way in ("world_size=3", "gradwire run -n 3", "torchrun --standalone", "srun -n 3"):
        assert way in errors


def test_an_example_runs_the_same_by_torchrun_and_by_itself():
    example = ROOT / "examples" / "03_pipeline.py"
    losses = set()
    for launcher in ([sys.executable], [*TORCHRUN, "--nproc-per-node=3"]):
        status, printed, errors = finished([*launcher, str(example)])
        assert status == 0, errors
        losses.add(re.search(r"^loss .*$", printed, re.M)[0])
    assert len(losses) == 1
