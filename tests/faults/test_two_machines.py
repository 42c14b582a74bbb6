"""One model that torchrun trains on two machines, which are network namespaces, over TLS."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from gradwire.agent.peers.secret import write_secret
from gradwire.launch.certs import Folder, make
from tests.injection import network as networks

pytestmark = [pytest.mark.needs_root, pytest.mark.slow, pytest.mark.processes]

STEPS = 30
DEAD = 4.0
LIMIT = 100

PROGRAM = f"""
import sys, time
import torch
from torch import nn
import gradwire as gw

STEPS, WIDTH = {STEPS}, int(sys.argv[2])
timeouts = gw.Timeouts(join=60, call=30, backward=30, suspect=2.0, dead={DEAD})
options = gw.Options(listen="tcp://0.0.0.0:0", timeouts=timeouts)

def main():
    names = ["w0", "w1", "w2", "w3"]
    parts = [gw.RemoteModule(name, part, (n, WIDTH)) for n, name in enumerate(names)]
    optimizer = gw.DistributedOptimizer(
        torch.optim.SGD, [p for m in parts for p in m.remote_parameters()], lr=0.1
    )
    for step in range(STEPS):
        began = time.monotonic()
        x = torch.linspace(-1, 1, 16 * WIDTH).reshape(16, WIDTH)
        for module in parts:
            x = module(x)
        loss = x.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {{step}} loss {{loss.item()!r}} {{time.monotonic() - began:.4f}}", flush=True)

def part(n, width):
    torch.manual_seed(n)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())

if __name__ == "__main__":
    gw.run(main, options=options)
"""


def expected(width):
    """The losses in one process."""
    parts = []
    for n in range(4):
        torch.manual_seed(n)
        parts.append(nn.Sequential(nn.Linear(width, width), nn.Tanh()))
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        x = torch.linspace(-1, 1, 16 * width).reshape(16, width)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Node:
    """torchrun on one machine, and what it prints."""

    def __init__(self, network, n, program, width):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=1"]
        command += ["--rdzv-endpoint=10.77.0.1:29400", f"--local-addr=10.77.0.{n + 1}"]
        command += [f"--rdzv-conf=is_host={int(n == 0)}"]  # a namespace has no host name of its own
        where = ["ip", "netns", "exec", network.namespaces[n]]
        self.process = subprocess.Popen(
            [*where, *command, str(program), "train", str(width)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def step(self, n):
        """Wait for the end of the nth step."""
        for line in self.process.stdout:
            if line.startswith(f"step {n} "):
                return
        raise AssertionError(self.process.stderr.read())

    def finish(self):
        """The exit status, what is left of its output, and its errors."""
        printed, errors = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, printed, errors

    def kill(self):
        """Everything on this machine dies."""
        os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def two_nodes(network, program, width=8):
    nodes = [Node(network, n, program, width) for n in range(2)]
    try:
        yield nodes
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.kill()
            node.process.communicate()


@pytest.fixture
def program(tmp_path, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    files = Folder(tmp_path / "job")
    make(files, ["w0", "w1", "w2", "w3"])
    first = files.tls("w0")
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", write_secret(tmp_path / "secret"))
    monkeypatch.setenv("GRADWIRE_TLS_CERT", first.certificate.replace("w0.", "{name}."))
    monkeypatch.setenv("GRADWIRE_TLS_KEY", first.key.replace("w0.", "{name}."))
    monkeypatch.setenv("GRADWIRE_TLS_CA", first.authority)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return path


@pytest.fixture
def network():
    with networks.Network(2, seed=1) as made:
        yield made


def losses(printed):
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+) ", printed, re.M)]


def test_both_train_one_model_bit_for_bit(network, program):
    with two_nodes(network, program) as nodes:
        (status, printed, errors), (other, _, _) = (node.finish() for node in nodes)

    assert (status, other) == (0, 0), errors
    assert losses(printed) == expected(8)


def test_a_link_that_is_cut_for_three_seconds_and_comes_back_changes_nothing(network, program):
    with two_nodes(network, program) as nodes:
        nodes[0].step(3)
        network.unplug(1)
        time.sleep(3)  # what is tested is that real time passes
        network.heal()
        (status, printed, errors), (other, _, _) = (node.finish() for node in nodes)

    assert (status, other) == (0, 0), errors
    assert losses(printed) == expected(8)[4:]


def test_a_machine_that_dies_ends_the_job_by_name(network, program):
    with two_nodes(network, program) as nodes:
        nodes[0].step(3)
        network.unplug(1)
        nodes[1].kill()
        began = time.monotonic()
        status, _, errors = nodes[0].finish()

    assert status == 1
    assert time.monotonic() - began < DEAD + 30  # torchrun takes a while to end
    assert re.search(r"(PeerLost|StepFailed|CallTimeout).*w[23]", errors)


def test_training_is_exact_over_a_slow_and_long_line(network, program):
    network.disturb(delay=0.01)  # 20 ms there and back
    for n in range(2):
        network.slow(n, "100mbit")
    with two_nodes(network, program, width=64) as nodes:
        (status, printed, errors), (other, _, _) = (node.finish() for node in nodes)

    assert (status, other) == (0, 0), errors
    assert losses(printed) == expected(64)
