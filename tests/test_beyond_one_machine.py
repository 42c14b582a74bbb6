"""The guide to launchers is followed to the letter, with two addresses of this machine as two."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwire.places import Place, place_in

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "guide" / "beyond-one-machine.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.M | re.S)
SHIMS = {"python": "", "gradwire": " -m gradwire", "torchrun": " -m torch.distributed.run"}

pytestmark = pytest.mark.usefixtures("no_secret")


def of(language):
    return [text for found, text in BLOCKS if found == language]


@pytest.fixture
def directory(tmp_path):
    """Where the reader works: the program of the guide, and the commands it uses."""
    for program in of("python"):
        (tmp_path / program.split()[1]).write_text(program)
    (tmp_path / "bin").mkdir()
    for name, arguments in SHIMS.items():
        shim = tmp_path / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        shim.chmod(0o755)
    return tmp_path


def on_two_machines(command):
    """The command on each of them, at the same time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = command.strip().replace("first.example.org:29400", f"127.0.0.2:{port}")
    first, second = (
        command.replace("--nnodes", f"--local-addr 127.0.0.{n} --nnodes") for n in (2, 3)
    )
    return f"{first} & {second}; first=$?; wait $!; exit $((first + $?))\n"


def hello():
    """What hello.py prints, computed in one process."""
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    loss = torch.tanh(x).square().sum()
    loss.backward()
    return f"loss {loss.item():.6f}, gradient of x[0] {x.grad[0].item():.6f}"


def training():
    """What train.py prints, likewise."""
    blocks = []
    for seed in range(4):
        torch.manual_seed(seed)
        blocks.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        loss = (model(torch.eye(4)) - 0.5).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return f"loss {loss.item():.6f} over 4 workers"


@pytest.mark.slow
@pytest.mark.processes
def test_the_guide_works_from_its_first_command_to_its_last(directory):
    *commands, last = [text for text in of("sh") if "srun" not in text]  # see tests/slurm
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = os.environ | {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in places if place),
        "OMP_NUM_THREADS": "1",
    }

    done = subprocess.run(
        ["bash", "-c", "set -e\n" + "".join(commands) + "set +e\n" + on_two_machines(last)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("loss")]
    by_gradwire, by_torchrun, trained, trained_on_two = lines
    assert by_gradwire == by_torchrun == hello()
    assert trained == trained_on_two == training()


def test_the_variables_of_kubernetes_give_a_place():
    (job,) = of("yaml")
    pairs = re.findall(r'\{name: ([A-Z_]+), value: (?:"([^"]*)"|([^"}]*))\}', job)
    environment = {name: quoted or plain for name, quoted, plain in pairs}

    place = place_in(environment | {"JOB_COMPLETION_INDEX": "1"})

    assert place == Place("job", 1, 2, "tcp://train-0.train:29500", is_one_machine=False)
    assert environment["GRADWIRE_TLS_KEY"] == "/run/secrets/job/{name}.key"


def test_every_launcher_of_the_table_is_in_the_guide():
    for sign in ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "LWS_GROUP_SIZE", "JOB_COMPLETION_INDEX"):
        assert f"| `{sign}`" in TEXT
