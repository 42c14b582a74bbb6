"""Every block of code in the docs is run: here, by a test that is named here, or there is a reason.

A block is known by its page and its first line. What it needs besides (names that a reader would
have by then) is in PAGES and NEEDS; a new block is run with what its page has, and fails if that is
not enough.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

import gradwire

ROOT = Path(__file__).parents[1]
GUIDE = "docs/guide/"


class Block(NamedTuple):
    page: str
    language: str
    text: str

    @property
    def key(self) -> tuple[str, str]:
        return self.page, self.text.splitlines()[0]

    def __str__(self) -> str:
        return f"{Path(self.page).name}: {self.key[1]}"


def blocks() -> list[Block]:
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page = path.relative_to(ROOT).as_posix()
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.M | re.S):
            found.append(Block(page, language, text))
    return found


# -- which are run elsewhere, and which are not run at all

ELSEWHERE = {
    ("README.md", "import torch, gradwire as gw"): "test_docs.py",
    (f"{GUIDE}security.md", None): "test_guide.py",
    (f"{GUIDE}beyond-one-machine.md", None): "test_beyond_one_machine.py",
    (f"{GUIDE}ray.md", None): "ray/test_ray.py",
    (
        f"{GUIDE}seeing.md",
        "38.6 ms over 3 workers (one clock)    trace: step.json.gz, open it at ui.perfetto.dev",
    ): "seeing/test_timeline.py",  # such a text of a history that is always the same
    (
        f"{GUIDE}seeing.md",
        "gradwire.errors.CallTimeout: w1 did not answer w0#4 (train.load) within 5 s",
    ): "seeing/test_story.py",
    (f"{GUIDE}interactive.md", None): "test_notebook.py",
    (f"{GUIDE}seeing.md", "import gradwire"): "seeing/test_metrics_guide.py",
    (
        "docs/concepts/membership.md",
        "for attempt in gradwire.retrying(times=5, restore=restore):",
    ): "test_guide.py",  # as a part of a program of the guide
    (f"{GUIDE}seeing.md", "1 root on w0, 2 workers, 2 edges of 4 KiB"): "seeing/test_graph.py",
    (f"{GUIDE}failures.md", "import os"): "test_failures.py",
    (f"{GUIDE}failures.md", "def main():"): "test_failures.py",
    (f"{GUIDE}failures.md", 'faults = "kill before-reply Call on w1"'): "test_failures.py",
    (f"{GUIDE}failures.md", 'faults = "kill before-handle Start on w1"'): "test_failures.py",
    (f"{GUIDE}failures.md", 'faults = "kill before-reply Prepare on w1"'): "test_failures.py",
    (f"{GUIDE}failures.md", 'faults = "stop before-reply Call on w1"'): "test_failures.py",
    (f"{GUIDE}failures.md", 'faults = "close before-send Result on w1 nth 2"'): "test_failures.py",
}

NOT_RUN = {
    (
        "README.md",
        "pip install .    # in a checkout; Linux, Python 3.11 or newer, torch 2.11 or newer",
    ): "installs packages",
    ("README.md", "make demo    # train a model split over three processes; compare with one"): (
        "would run all tests from a test; test_examples.py runs the demo"
    ),
    ("README.md", "              w0                                          w1"): "a picture",
    (
        f"{GUIDE}getting-started.md",
        "make demo       # makes .venv, installs, trains a model over three processes",
    ): "installs packages; test_examples.py runs the demo",
}


def is_elsewhere(block: Block) -> bool:
    if block.language == "text" and block.page == f"{GUIDE}failures.md":
        return True  # what a program prints: test_failures.py compares
    if block.language == "text" and block.page.startswith("docs/concepts/"):
        return True  # a picture
    if block.page == "docs/reference.md" and block.language == "python":
        return True  # a signature, written by `make docs`: test_docs.py compares
    return block.key in ELSEWHERE or (block.page, None) in ELSEWHERE


ALL = blocks()
COMMANDS = [b for b in ALL if b.language in ("", "sh") and not is_elsewhere(b)]
PROGRAMS = [b for b in ALL if b.language in ("python", "pycon") and not is_elsewhere(b)]


def test_every_block_is_run_or_has_a_reason():
    ours = {*PROGRAMS, *(block for block in COMMANDS if block.key not in NOT_RUN)}
    left = [str(b) for b in ALL if b not in ours and not is_elsewhere(b) and b.key not in NOT_RUN]

    assert left == []
    assert len(PROGRAMS) > 10


def test_no_entry_here_is_about_a_block_that_is_gone():
    known = {block.key for block in ALL} | {(block.page, None) for block in ALL}

    assert [key for key in (*ELSEWHERE, *NOT_RUN, *NEEDS, *SCRIPTS) if key not in known] == []
    assert all((ROOT / "tests" / test).exists() for test in ELSEWHERE.values())


# -- programs that a worker runs

IMPORTS = "import gradwire\nimport torch\nfrom torch import nn\n"

MODEL = """
class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layer = nn.Linear(n, n)

    def forward(self, x):
        return self.layer(x)

x = torch.ones(64)

def main():
    gradwire.rpc_sync("w1", torch.sin, args=(torch.ones(2),))
"""

TRAINING = """
def build_model():
    return gradwire.RemoteModule("w1", nn.Linear, (4, 1))

batch = torch.ones(4)

def loss_of(batch):
    return model(batch).square().sum()

def restore(attempt): ...

load_checkpoint = restore
"""

STREAMS = """
def batches(n, weight):
    for i in range(n):
        yield torch.full((4,), float(i)) * weight

weight = torch.ones(4, requires_grad=True)

class Counter:
    def __init__(self, value=0):
        self.value = value

    def add(self, n):
        self.value += n
        return self.value
"""

TRAINED = """
model = build_model()
optimizer = gradwire.DistributedOptimizer(torch.optim.Adam, model.remote_parameters())
last_checkpoint = optimizer.checkpoint()
"""

PAGES = {
    f"{GUIDE}getting-started.md": IMPORTS + MODEL,
    f"{GUIDE}restarts.md": IMPORTS + TRAINING,
    f"{GUIDE}failures.md": "import gradwire\nimport torch\n",
    f"{GUIDE}seeing.md": "import gradwire\nimport torch\n",
    f"{GUIDE}streams-and-actors.md": IMPORTS + STREAMS,
    "docs/reference.md": IMPORTS + MODEL + TRAINING,
}
"""what a module of the reader's has by then"""

NEEDS = {
    ("README.md", 'y = gw.rpc_sync("w1", stage, args=(x,))'): (
        "import gradwire as gw\nx = torch.ones(3, requires_grad=True)\n"
        "stage, loss = torch.sin, torch.sum\n"
    ),
    (f"{GUIDE}getting-started.md", 'y = gradwire.rpc_sync("w1", stage, args=(x,))'): (
        "x.requires_grad_()\nstage, loss = torch.sin, torch.sum\n"
    ),
    (f"{GUIDE}getting-started.md", 'h = gradwire.rpc_sync("w1", torch.sin, args=(x,))'): (
        "ref = gradwire.remote('w1', Model, args=(64,))\n"
    ),
    (
        f"{GUIDE}getting-started.md",
        "optimizer = gradwire.DistributedOptimizer(torch.optim.Adam, refs, lr=1e-3)",
    ): (
        "model = gradwire.RemoteModule('w1', nn.Linear, (4, 1))\n"
        "refs = model.remote_parameters()\n"
        "batches = [(torch.ones(4), torch.ones(1))] * 2\n"
        "def loss_of(model, x, y):\n    return (model(x) - y).square().sum()\n"
    ),
    (
        f"{GUIDE}getting-started.md",
        'layer = gradwire.RemoteModule("w1/cuda:0", nn.Linear, (512, 10))  # "w1" alone is its CPU',
    ): "x = torch.ones(512)\n",
    (
        f"{GUIDE}gpus.md",
        'y = gradwire.rpc_sync("w1", stage, args=(x,), device_map={"cuda:0": "cuda:1"})',
    ): "x, stage = torch.ones(3), torch.sin\n",
    (
        f"{GUIDE}restarts.md",
        "for attempt in gradwire.retrying(times=5, restore=restore):",
    ): TRAINED,
    (f"{GUIDE}restarts.md", "def restore(attempt):"): TRAINED,
    (
        "docs/reference.md",
        ">>> for attempt in gradwire.retrying(times=5, restore=load_checkpoint):",
    ): TRAINED,
    (
        "docs/reference.md",
        ">>> optimizer = gradwire.DistributedOptimizer(torch.optim.Adam, refs, lr=1e-3)",
    ): TRAINED + "refs = model.remote_parameters()\n",
    ("docs/reference.md", ">>> gradwire.register_codec(Fraction, str, Fraction)"): (
        "class Fraction(str): ...\n"
    ),
    ("docs/reference.md", ">>> with gradwire.context() as context_id:"): (
        "x = torch.ones(3, requires_grad=True)\n"
    ),
    (
        "README.md",
        'with gradwire.trace("step.json.gz"):   # on any worker: what all of them do, and where '
        "the time goes",
    ): "def step(): ...\n",
    ("docs/reference.md", '>>> with gradwire.trace("step.json.gz") as t:'): (
        "def train_one_step():\n    gradwire.rpc_sync('w1', torch.sin, args=(torch.ones(2),))\n"
    ),
    ("docs/reference.md", '>>> with gradwire.span("loader"):'): "batches = iter([1])\n",
    ("docs/reference.md", ">>> with cluster(2) as workers:"): (
        "from gradwire.testing import cluster\n"
    ),
}
"""what a block needs that an earlier one, or the reader, has made on the worker that runs it"""

AFTER = {
    ("docs/concepts/groups.md", 'trainers = gradwire.group("trainers", ["w0", "w1"])'): (
        "assert gradwire.rpc_sync(trainers, train) == [[0.0, 1.0], [0.0, 1.0]]\n"
    ),
    (f"{GUIDE}streams-and-actors.md", "def batches(n, weight):"): (
        "assert len(list(gradwire.stream('w1', batches, args=(3, weight)))) == 3\n"
    ),
    (f"{GUIDE}streams-and-actors.md", "async def through(x):"): (
        "gradwire.rpc_sync('w1', through, args=(torch.ones(2),))\n"
    ),
    (f"{GUIDE}restarts.md", "def restore(attempt):"): "restore(None)\n",
    (
        f"{GUIDE}restarts.md",
        "@gradwire.idempotent",
    ): "gradwire.rpc_sync('w1', load_shard, ('x',))\n",
}
"""how what a block defines is used"""

REPLACED = {
    '"w1/cuda:0"': '"w1/cuda:0"' if torch.cuda.is_available() else '"w1/cpu"',
    # The fault must happen: a backward over the worker that closes, instead of the dots.
    "that never happened\n        ...": "that never happened\n"
    "        x = torch.ones(2, requires_grad=True)\n"
    "        y = gradwire.rpc_sync('w1', torch.sin, args=(x,)).sum()\n"
    "        try:\n"
    "            y.backward()\n"
    "        except gradwire.PeerLost:\n"
    "            pass",
}


def source_of(block: Block) -> str:
    text = block.text
    if block.language == "pycon":
        text = re.sub(r"^(>>>|\.\.\.) ?", "", text, flags=re.M)
    for old, new in REPLACED.items():
        text = text.replace(old, new)
    return text


SCRIPTS = {
    (f"{GUIDE}getting-started.md", 'if __name__ == "__main__":'): 1,
    (f"{GUIDE}getting-started.md", 'gradwire.init_rpc(f"w{rank}", rank=rank, world_size=3)'): 3,
    (f"{GUIDE}gpus.md", "from gradwire.testing.pretend import streams"): 1,
    ("docs/reference.md", ">>> def main(x):"): 1,
    ("docs/reference.md", ">>> with gradwire.workers(3) as names:"): 1,
    ("docs/reference.md", ">>> names = gradwire.start(3)"): 1,
}
"""blocks that are programs of their own, and how many processes run them"""

ON_WORKERS = [block for block in PROGRAMS if block.key not in SCRIPTS]


@pytest.fixture
def module():
    """A module of the reader's."""
    made = ModuleType("a_module_of_the_docs")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


@pytest.mark.slow
@pytest.mark.parametrize("block", ON_WORKERS, ids=str)
def test_a_block_runs_on_a_worker(block, module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space, source = vars(module), compile(source_of(block), str(block), "exec")
    exec(PAGES.get(block.page, IMPORTS), space)
    if re.search(r"^def test_", block.text, re.M):
        exec(source, space)
        for test in [value for name, value in space.items() if name.startswith("test_")]:
            test()
        return
    if block.key in AFTER:  # it defines what the workers are to have
        exec(source, space)
    with gradwire.testing.cluster(3, expose=[module]) as workers:
        workers[0].run(run_block, block, source, space)


def run_block(block, source, space):
    exec(NEEDS.get(block.key, ""), space)
    if block.key in AFTER:
        exec(AFTER[block.key], space)
    else:
        exec(source, space)


# -- programs and commands of their own


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("block", [b for b in PROGRAMS if b.key in SCRIPTS], ids=str)
def test_a_block_runs_as_a_program(block, tmp_path, free_port):
    begin = f"{IMPORTS}import os\nrank = int(os.environ['RANK'])\n{MODEL}"
    program = tmp_path / "program.py"
    program.write_text(begin + source_of(block))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    started = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, **place, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SCRIPTS[block.key])
    ]
    ends = [process.communicate(timeout=100)[1] for process in started]

    assert [process.returncode for process in started] == [0] * len(started), ends
    assert ends == [""] * len(started)


TRAIN = """
import os
import sys

import torch
import torch.distributed.rpc as rpc

assert "gradwire" in rpc.init_rpc.__module__
assert sys.argv[1:] in ([], ["--epochs", "3"])
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "PORT")
rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size)
assert rpc.rpc_sync(f"w{world_size - 1}", torch.add, args=(torch.ones(1), 1)).item() == 2
rpc.shutdown()
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("no_secret")
@pytest.mark.parametrize("block", [b for b in COMMANDS if b.key not in NOT_RUN], ids=str)
def test_the_commands_of_a_block_run(block, tmp_path, free_port):
    (tmp_path / "train.py").write_text(TRAIN.replace('"PORT"', f'"{free_port}"'))
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "python"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}"}
    if "PYTHONPATH" in environment:  # which may be relative to where the tests run
        places = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in places)

    done = subprocess.run(
        ["bash", "-e", "-c", block.text],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr


# -- names that the docs use


def test_testing_and_compat_are_there_without_an_import_of_their_own():
    program = (
        "import sys, gradwire\n"
        "assert not {'gradwire.testing', 'gradwire.compat'} & sys.modules.keys()\n"
        "gradwire.testing.cluster, gradwire.compat.install\n"
        "assert not hasattr(gradwire, 'nothing_of_that_name')\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
