"""What the workers of a soak run. w0 trains, and kills: the others, and now and then itself.

Nothing is lost with w0 but the step it was in: after each step the loss and all that the next one
begins with are in the folder of the soak, the latter replaced in one go.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn

import gradwire
from gradwire import PeerLost
from gradwire.current import current_worker
from tests.leftovers import eventually, leftovers

WIDTH, BATCH = 32, 16
WAYS = ("w1", "w2", "w1", "w2", "w1", "w2", "w1", "w0")
_SAMPLE_SECONDS = 1.0
_FLOAT_BYTES = 8
_IMPATIENCE = 0.2


class Stage(nn.Module):
    """One half of the model, on a worker of its own."""

    def __init__(self, n: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(n)
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return tuple(torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=made) for _ in range(2))


def loss_of(stages, step: int) -> torch.Tensor:
    x, y = batch(step)
    for stage in stages:
        x = stage(x)
    return (x - y).square().mean()


def measure() -> dict[str, int]:
    """What this process uses."""
    status = Path("/proc/self/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "incarnation": gradwire.incarnation(),
        "kilobytes": int(rss.split()[1]),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


class Model:
    """Both stages and their optimizer, made anew from what was saved."""

    def __init__(self, saved) -> None:
        self.stages = [gradwire.RemoteModule(f"w{n}", Stage, (n,)) for n in (1, 2)]
        refs = [ref for stage in self.stages for ref in stage.remote_parameters()]
        self.optimizer = gradwire.DistributedOptimizer(torch.optim.Adam, refs, lr=1e-3)
        if saved is not None:
            self.optimizer.restore(saved)

    def step(self, n: int) -> float:
        with gradwire.context() as context:
            loss = loss_of(self.stages, n)
            gradwire.backward(context, [loss])
            self.optimizer.step(context)
        return loss.item()

    def saved(self, done: int):
        return {"done": done, **self.optimizer.checkpoint()}


class Folder:
    """Where w0 finds what its earlier incarnations have done."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def committed(self):
        file = self.path / "checkpoint"
        return torch.load(file, weights_only=True) if file.exists() else None

    def commit(self, loss: float, saved) -> None:
        n = saved["done"] - 1
        with open(self.path / "losses", "r+b" if n else "wb") as file:
            file.seek(n * _FLOAT_BYTES)
            file.write(torch.tensor(loss, dtype=torch.float64).numpy().tobytes())
        torch.save(saved, self.path / "draft")
        os.replace(self.path / "draft", self.path / "checkpoint")

    def losses(self, done: int) -> torch.Tensor:
        data = bytearray((self.path / "losses").read_bytes()[: done * _FLOAT_BYTES])
        return torch.frombuffer(data, dtype=torch.float64)

    def until(self, seconds: float) -> float:
        """When it is over, from the first incarnation of w0 on; by the clock of the machine."""
        if not (self.path / "until").exists():
            self.note("until", when=time.monotonic() + seconds)
        return self.noted("until")[0]["when"]

    def note(self, name: str, **what) -> None:
        with open(self.path / name, "a") as file:
            file.write(json.dumps(what) + "\n")

    def noted(self, name: str) -> list[dict]:
        file = self.path / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Killer:
    """A thread of w0's that kills a worker every so often, at random.

    Mostly not before a step was committed since the last kill: where a process takes longer to
    start than from one kill to the next, nothing would ever be done.
    """

    def __init__(self, folder: Folder, seed: int, every: float) -> None:
        self._folder, self._every = folder, every
        self._random = random.Random(f"{seed} {gradwire.incarnation()}")
        self.pids: dict[str, int] = {}
        self._over, self._progress = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._kill, name="killer", daemon=True)
        self._thread.start()

    def committed(self) -> None:
        self._progress.set()

    def close(self) -> None:
        self._over.set()
        self._progress.set()
        self._thread.join(10)

    def _kill(self) -> None:
        while not self._over.wait(self._every * self._random.uniform(0.5, 1.5)):
            if self._random.random() > _IMPATIENCE:
                self._progress.wait()
            if self._over.is_set():
                return
            self._progress.clear()
            victim = self._random.choice(WAYS)
            pid = self.pids.get(victim, 0)
            if pid and _is_sibling(pid):
                self._folder.note("kills", worker=victim)
                os.kill(pid, signal.SIGKILL)


def _is_sibling(pid: int) -> bool:
    """Whether this is a process of the same run still, and no other that has its number now."""
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return False
    return int(parent) == os.getppid()


class Training:
    """One incarnation of w0."""

    def __init__(self, folder: Folder, killer: Killer) -> None:
        self._folder, self._killer = folder, killer
        self._saved = folder.committed()
        self._model: Model | None = None
        self._next_sample = 0.0

    @property
    def done(self) -> int:
        return 0 if self._saved is None else self._saved["done"]

    def restore(self, attempt=None) -> None:
        self._model = None
        if attempt is not None:
            self._folder.note("restores", error=type(attempt.error).__name__, step=self.done)
        self._killer.pids = {f"w{n}": gradwire.rpc_sync(n, os.getpid) for n in range(3)}
        self._model = Model(self._saved)

    def step(self) -> None:
        for attempt in gradwire.retrying(times=100, restore=self.restore, wait=60):
            with attempt:
                if self._model is None:
                    self.restore()
                loss = self._model.step(self.done)
                saved = self._model.saved(self.done + 1)
        self._folder.commit(loss, saved)
        self._saved = saved
        self._killer.committed()
        if time.monotonic() >= self._next_sample:
            self._next_sample = time.monotonic() + _SAMPLE_SECONDS
            self._sample()

    def _sample(self) -> None:
        for worker in ("w0", "w1", "w2"):
            try:
                self._folder.note("samples", worker=worker, **gradwire.rpc_sync(worker, measure))
            except PeerLost:
                continue
        self._folder.note("steps", done=self.done)

    def end(self) -> list[str]:
        """Let go of everything; what is left behind on any worker."""
        self._model = None
        gc.collect()
        return [line for name in ("w0", "w1", "w2") for line in gradwire.rpc_sync(name, left_here)]


class _Member:
    def __init__(self, worker) -> None:
        self.worker = worker


def left_here() -> list[str]:
    """What this worker remembers of contexts, passes and references, but for the call that asks."""
    here = [_Member(current_worker.find())]

    def left() -> list[str]:
        return [line for line in leftovers(here) if " jobs" not in line and "flight" not in line]

    eventually(lambda: not left())
    return left()


def train(path: str, seed: int, seconds: float, every: float) -> tuple[int, list[str]]:
    """Train for so long; how many steps were committed, and what was left behind."""
    torch.set_num_threads(1)
    folder = Folder(path)
    until = folder.until(seconds)
    killer = Killer(folder, seed, every)
    training = Training(folder, killer)
    while time.monotonic() < until or training.done == 0:
        training.step()
    killer.close()
    for attempt in gradwire.retrying(times=10, wait=60):
        with attempt:
            left = training.end()
    return training.done, left


def replayed(steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Losses and parameters of the same steps in one process, with torch alone."""
    torch.set_num_threads(1)
    stages = [Stage(n) for n in (1, 2)]
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    losses = []
    for n in range(steps):
        optimizer.zero_grad()
        loss = loss_of(stages, n)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), [each.detach() for each in parameters]
