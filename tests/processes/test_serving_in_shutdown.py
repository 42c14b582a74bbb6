"""A worker that serves from inside shutdown(): it stays as long as somebody's program runs."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

import gradwire
from gradwire.agent.peers.secret import write_secret
from tests.injection.processes import freeze, frozen
from tests.injection.proxy import FaultProxy
from tests.leftovers import eventually

_PROGRAM = """
import sys
import torch
import gradwire
from gradwire import Options, Timeouts
from gradwire.current import current_worker
from tests.injection.proxy import redirect

rank, place, dead, timeout, listen, world = sys.argv[1:]
rank, dead = int(rank), float(dead)
timeouts = Timeouts(suspect=dead / 3, dead=dead, connect=2, handshake=2)
options = Options(init_method=f"file://{place}", listen=listen, timeouts=timeouts)
gradwire.init_rpc(f"w{rank}", rank, int(world), options)
worker = current_worker.find()
if listen != "unix":  # by way of a proxy
    print(worker.directory.address(rank), flush=True)
    redirect(f"w{1 - rank}", sys.stdin.readline().strip())
    print("redirected", flush=True)
    sys.stdin.readline()
worker.agent.on_peer_lost(lambda lost, _: print(f"lost w{lost}", flush=True))
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

    def begin(rank, dead=15.0, timeout="", listen="unix", world="2", faults=""):
        settings = [str(rank), f"{tmp_path}/meet", str(dead), timeout, listen, world]
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "GRADWIRE_SECRET_FILE": str(secret),
                "GRADWIRE_FAULTS": faults,
                "OMP_NUM_THREADS": "1",
            },
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
    _read_until(trainer, "called\n")


def _read_until(worker, start):
    """The next line that starts so; its log is among what it says."""
    said = []
    for line in iter(worker.stdout.readline, ""):
        said.append(line)
        if line.startswith(start):
            return line
    raise AssertionError("it ended: " + "".join(said))


def _leave(*workers):
    said = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [text.splitlines()[-1] for text in said] == ["left"] * len(workers)
    assert not [text for text in said if "shut down without" in text]
    assert [worker.returncode for worker in workers] == [0] * len(workers)


@pytest.fixture
def may_take_150_seconds():
    """Not 60, after which pytest is told to print every stack."""
    faulthandler.dump_traceback_later(150, file=sys.__stderr__)  # it replaces that of pytest


@pytest.mark.usefixtures("may_take_150_seconds")
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


def test_a_server_waits_for_a_trainer_that_was_frozen_and_serves_it_again(start):
    """All that the trainer finds when it goes on is a connection that the server has given up."""
    server, trainer = start(1, dead=1.0, timeout="3600"), start(0, dead=1.0)
    assert trainer.stdout.readline() == "trains\n"
    _call(trainer)
    with frozen(trainer):
        _read_until(server, "lost w0\n")
    for _ in range(3):
        _call(trainer)
    _leave(trainer, server)


@pytest.fixture
def cut_off(start):
    """A server inside shutdown() and a trainer, with a proxy before each of them.

    A busy machine must not cause a loss of its own: the last word of the trainer would be lost with
    that connection, and behind a proxy a closed port looks like a network that is cut.
    """
    with ExitStack() as stack:
        workers = [
            start(rank, dead=4.0, timeout="3600", listen="tcp://127.0.0.1:0") for rank in (0, 1)
        ]
        proxies = []
        for worker in workers:
            address = _read_until(worker, "tcp://127.0.0.1:").strip()
            proxies.append(stack.enter_context(FaultProxy(address)))
        for worker, proxy in zip(workers, reversed(proxies), strict=True):
            worker.stdin.write(f"{proxy.address}\n")
            worker.stdin.flush()
            _read_until(worker, "redirected\n")
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
        yield *workers, proxies


@pytest.mark.parametrize("calls", [True, False], ids=["calls meanwhile", "silent meanwhile"])
def test_a_server_serves_again_when_a_network_that_was_cut_is_back(cut_off, calls):
    trainer, server, proxies = cut_off
    _read_until(trainer, "trains\n")
    _call(trainer)
    for proxy in proxies:
        proxy.stall()
    if calls:
        trainer.stdin.write("\n")  # made now, and again when the network is back
        trainer.stdin.flush()
    for worker, other in ((trainer, "w1"), (server, "w0")):
        _read_until(worker, f"lost {other}\n")
    to_trainer = proxies[0]
    known = len(to_trainer._pairs)
    assert eventually(lambda: len(to_trainer._pairs) > known + 1, 30), "the server does not try"
    for proxy in proxies:
        proxy.heal()
    if calls:
        _read_until(trainer, "called\n")
    for _ in range(3):
        _call(trainer)
    assert server.poll() is None, "it left within a moment of the link's return"
    _leave(trainer, server)


def test_both_leave_if_a_program_ended_while_the_network_was_cut(cut_off):
    trainer, server, proxies = cut_off
    _read_until(trainer, "trains\n")
    _call(trainer)
    for proxy in proxies:
        proxy.stall()
    trainer.stdin.close()
    trainer.stdin = None  # so that communicate() does not flush it
    for worker, other in ((trainer, "w1"), (server, "w0")):
        _read_until(worker, f"lost {other}\n")
    for proxy in proxies:
        proxy.heal()
    _leave(trainer, server)


def test_a_worker_that_gives_up_names_whom_and_fails(start):
    server, trainer = start(1, dead=1.0, timeout="2"), start(0, dead=1.0)
    assert trainer.stdout.readline() == "trains\n"
    _call(trainer)
    freeze(trainer)
    said, _ = server.communicate(timeout=60)
    assert f"{gradwire.DeadlinePassed.__name__}: w1 shut down without w0, which did not" in said
    assert server.returncode == 1


def test_one_that_only_waits_for_another_is_not_blamed(start):
    """w1 is frozen when it has told w0 that it is over, and not w2, which waits for it too."""
    frozen = start(1, dead=1.0, world="3", faults="stop before-send Leaving with w2")
    waiting = start(2, dead=1.0, world="3", timeout="3600")
    trainer = start(0, dead=1.0, world="3", timeout="2")
    _read_until(trainer, "lost w1\n")
    said, _ = trainer.communicate(timeout=60)

    assert "w0 shut down without w1, which did not shut down within 2 s" in said
    assert "the last program was over; w2 had not left either, and may have waited for it" in said
    assert trainer.returncode == 1
    frozen.kill()  # nobody listens there any more
    said, _ = waiting.communicate(timeout=60)
    assert said.splitlines()[-1] == "left"
    assert waiting.returncode == 0
