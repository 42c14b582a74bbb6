"""A process that is forked from a worker: it is no worker, and does not disturb its parent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from gradwire.agent.peers.secret import write_secret

_PROGRAM = """
import gc, multiprocessing, os, queue, sys, warnings
import torch
import gradwire, gradwire.rpc.rref
from gradwire import Options, UsageError

warnings.simplefilter("ignore")  # newer Pythons warn of a fork with threads

gate = queue.SimpleQueue()

def held(x):
    gate.get(timeout=60)
    return x + 2

def let_go():
    gate.put(None)

def refused(use):
    try:
        use()
    except UsageError as error:
        assert "forked from a worker" in str(error), error
    else:
        raise AssertionError("it was not refused")

def leave_from(pool):
    with pool.lock:  # as a signal handler does that interrupts it there
        child = os.fork()
        if child == 0:
            sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0, "SystemExit was replaced by another error"

def in_child(how):
    if how == "shutdown":
        gradwire.shutdown()
    if how == "use":
        refused(lambda: gradwire.rpc_sync("w1", torch.add, args=(1, 1)))
        refused(waiting.wait)
        refused(reference.to_here)
        refused(loss.sum().backward)
        refused(lambda: gradwire.init_rpc("w2", 0, 1))
    if how == "drop":
        del globals()["reference"], globals()["large"]  # a reference, and a shared block
        gc.collect()
    if how == "_exit":
        os._exit(0)
    sys.exit(0)

rank = int(sys.argv[1])
options = Options(init_method=sys.argv[2], listen=sys.argv[3])
gradwire.init_rpc(f"w{rank}", rank, 2, options, expose=[held, let_go])
if rank == 0:
    ones = torch.ones(1 << 18)
    reference = gradwire.remote("w1", torch.add, args=(1, 1))
    assert reference.to_here() == 2
    with gradwire.context():
        loss = gradwire.rpc_sync("w1", torch.mul, args=(torch.ones(2, requires_grad=True), 2))
        for how in ("exit", "shutdown", "use", "drop", "_exit"):
            large = gradwire.rpc_sync("w1", torch.add, args=(ones, 1))
            waiting = gradwire.rpc_async("w1", held, args=(ones,))  # not answered by the fork
            child = os.fork()
            if child == 0:
                in_child(how)
            assert os.waitpid(child, 0)[1] == 0, how
            # The parent goes on, and what it holds is as it was.
            assert gradwire.rpc_sync("w1", torch.add, args=(2, 2)) == 4
            gradwire.rpc_sync("w1", let_go)
            assert waiting.wait()[0] == 3
            assert (large == 2).all()
            assert reference.to_here() == 2
        loss.sum().backward()
    leave_from(gradwire.current.current_worker.find().agent.dispatch.service)
    process = multiprocessing.get_context("fork").Process(target=gradwire.shutdown)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert gradwire.rpc_sync("w1", torch.add, args=(2, 2)) == 4
    print("all went on", flush=True)
gradwire.shutdown()
print("left", flush=True)
"""


def _start(*arguments, secret):
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "GRADWIRE_SECRET_FILE": str(secret), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("listen", ["unix", "tcp://127.0.0.1:0"])
def test_a_fork_of_a_worker_ends_and_leaves_its_parent_alone(tmp_path, listen):
    """Rank 0 forks, which also serves the store: a thread of torch's that a fork does not have."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    secret = tmp_path / "secret"
    write_secret(secret)
    workers = [_start(str(rank), place, listen, secret=secret) for rank in (0, 1)]
    try:
        said = [worker.communicate(timeout=60)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert said == ["all went on\nleft\n", "left\n"]


_RUN = """
import os, sys
import torch
import gradwire

def left_by(how):
    if how == "raises":
        raise ValueError("in the child")
    if how != "returns":
        sys.exit(how)
    return "not the value of the call"

def forked(how):
    child = os.fork()
    if child == 0:
        return left_by(how)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def main():
    ways = [0, 3, "a text", "raises", "returns"]
    in_calls = [gradwire.rpc_sync("w1", forked, args=(how,)) for how in ways]
    in_calls += [gradwire.rpc_sync("w1", forked, args=(how,)) for how in ways]  # by the reader
    assert in_calls == [0, 3, 1, 1, 0] * 2, in_calls
    for how, status in ((0, 0), (3, 3), ("returns", 0)):
        value = forked(how)
        if value == "not the value of the call":
            return value
        assert value == status, (how, value)
    return gradwire.rpc_sync("w1", torch.add, args=(2, 2)).item()

if __name__ == "__main__":
    print(gradwire.run(main, world_size=2))
"""


def test_a_fork_of_a_function_of_a_run_or_of_a_peer_reports_nothing(tmp_path):
    """Neither its exit, nor its error, nor its value is that of the function that has forked it."""
    program = tmp_path / "program.py"
    program.write_text(_RUN, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(program)]
    said = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert (said.returncode, said.stdout) == (0, "4\n"), said.stderr
    assert said.stderr.count("ValueError: in the child") == 2
