"""A worker that serves from inside shutdown(): it stays as long as somebody's program runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import gradwire
from gradwire.agent.secret import write_secret

_PROGRAM = """
import sys
import torch
import gradwire
from gradwire import Options, Timeouts

rank, place, dead, timeout = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
timeouts = Timeouts(suspect=dead / 3, dead=dead, connect=2, handshake=2)
options = Options(init_method=f"file://{place}", listen="unix", timeouts=timeouts)
gradwire.init_rpc(f"w{rank}", rank, 2, options)
if rank == 0:
    print("trains", flush=True)
    for line in sys.stdin:  # the test says when
        for step in gradwire.retrying(20, wait=30):
            with step:
                assert gradwire.rpc_sync("w1", torch.add, args=(1, 1)) == 2
        print("called", flush=True)
gradwire.shutdown(timeout=float(timeout) if timeout else None)
print("left", flush=True)
"""


@pytest.fixture
def start(tmp_path):
    secret = tmp_path / "secret"
    write_secret(secret)
    started = []

    def begin(rank, dead=15.0, timeout=""):
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(rank), f"{tmp_path}/meet", str(dead), timeout],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GRADWIRE_SECRET_FILE": str(secret), "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def _call(trainer):
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    lines = iter(trainer.stdout.readline, "")  # its log is among them
    assert any(line == "called\n" for line in lines), "it ended"


def _leave(*workers):
    said = [worker.communicate(timeout=60)[0] for worker in workers]
    assert said == ["left\n"] * len(workers)
    assert [worker.returncode for worker in workers] == [0] * len(workers)


def test_a_server_stays_while_another_trains_longer_than_shutting_down_may_take(start):
    """For real, with the default of 60 s: its time has not begun while the trainer is at work."""
    server, trainer = start(1), start(0)
    assert trainer.stdout.readline() == "trains\n"
    until = time.monotonic() + 70
    while time.monotonic() < until:
        _call(trainer)
        time.sleep(1)
    _call(trainer)
    _leave(trainer, server)


def test_a_server_waits_for_a_trainer_that_was_cut_off_and_serves_it_again(start):
    """The trainer is frozen until the server has given it up, as if the network were cut."""
    server, trainer = start(1, dead=1.0, timeout="3600"), start(0, dead=1.0)
    assert trainer.stdout.readline() == "trains\n"
    _call(trainer)
    os.kill(trainer.pid, signal.SIGSTOP)
    said = server.stdout.readline()
    while "given up" not in said and "no sign of life" not in said:
        said = server.stdout.readline()
    time.sleep(3)  # it is lost after a second; then the server tries to reach it in vain
    os.kill(trainer.pid, signal.SIGCONT)
    for _ in range(3):
        _call(trainer)
    _, _ = trainer.communicate(timeout=60)
    said, _ = server.communicate(timeout=60)
    assert said.endswith("left\n")
    assert (trainer.returncode, server.returncode) == (0, 0)


def test_a_worker_that_gives_up_names_whom_and_fails(start):
    server, trainer = start(1, dead=1.0, timeout="2"), start(0, dead=1.0)
    assert trainer.stdout.readline() == "trains\n"
    _call(trainer)
    os.kill(trainer.pid, signal.SIGSTOP)
    said, _ = server.communicate(timeout=60)
    assert f"{gradwire.DeadlinePassed.__name__}: w1 shut down without w0, which did not" in said
    assert server.returncode == 1
