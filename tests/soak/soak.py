"""One soak: run, watch, replay, judge."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch

import gradwire
from gradwire import Options, Timeouts
from tests.soak import training
from tests.soak.training import Folder, replayed

RESTARTS = 60_000
SLACK = {"kilobytes": 48 << 10, "threads": 8, "descriptors": 12}
"""How far a process may go beyond what it used when it had been at work for a few seconds."""
_WARM_SAMPLES = 4
_START_AND_END_SECONDS = 300
_TELL_SECONDS = 5.0


@dataclass
class Report:
    """What came of it; `wrong` is empty if all is well."""

    steps: int
    kills: Counter[str]
    restores: Counter[str]
    grown: dict[str, int]
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(f"{worker} {n} times" for worker, n in sorted(self.kills.items()))
        grown = ", ".join(f"{n} {what}" for what, n in self.grown.items())
        lines = [
            f"{self.steps} steps committed, all replayed; killed: {kills or 'nobody'}",
            f"restored after {dict(self.restores)}; most that any process grew by: {grown}",
            *(self.wrong or ["nothing is wrong"]),
        ]
        return "\n".join(lines)


def soak(seconds: float, seed: int, every: float, say=lambda line: None) -> Report:
    """Train for so long with a kill about every so many seconds."""
    shared = _shared_memory()
    with tempfile.TemporaryDirectory(prefix="gradwire-soak-") as path:
        folder, over = Folder(path), threading.Event()
        teller = threading.Thread(target=_tell, args=(folder, over, say), daemon=True)
        teller.start()
        try:
            steps, left = gradwire.run(
                training.train,
                3,
                args=(path, seed, seconds, every),
                expose=[training, os.getpid],
                options=Options(timeouts=Timeouts(join=120, call=30, backward=30, step=30)),
                restarts=RESTARTS,
                timeout=seconds + _START_AND_END_SECONDS,
            )
        finally:
            over.set()
            teller.join()
        say(f"replaying {steps} steps")
        report = _judged(folder, steps)
    report.wrong += [f"left behind: {line}" for line in left]
    if grown := _shared_memory() - shared:
        report.wrong.append(f"left in /dev/shm: {sorted(grown)}")
    return report


def _judged(folder: Folder, steps: int) -> Report:
    kills = Counter(kill["worker"] for kill in folder.noted("kills"))
    restores = Counter(restore["error"] for restore in folder.noted("restores"))
    report = Report(steps, kills, restores, _growth(folder.noted("samples")))
    losses, parameters = replayed(steps)
    ours, saved = folder.losses(steps), folder.committed()
    if not torch.equal(ours, losses):
        first = int((ours != losses).nonzero()[0]) if len(ours) == len(losses) else len(ours)
        report.wrong.append(f"the loss of step {first} is not that of the replay")
    for n, (mine, theirs) in enumerate(zip(saved["parameters"], parameters, strict=True)):
        if not torch.equal(mine, theirs):
            report.wrong.append(f"parameter {n} is not that of the replay")
    for what, most in SLACK.items():
        if report.grown[what] > most:
            report.wrong.append(f"a process grew by {report.grown[what]} {what}, over {most}")
    return report


def _growth(samples: list[dict]) -> dict[str, int]:
    """The most that one incarnation of a worker went beyond what it used once it was warm."""
    by_incarnation = defaultdict(list)
    for sample in samples:
        by_incarnation[sample["worker"], sample["incarnation"]].append(sample)
    grown = dict.fromkeys(SLACK, 0)
    for taken in by_incarnation.values():
        for what in SLACK:
            warm = [sample[what] for sample in taken[_WARM_SAMPLES:]]
            if warm:
                grown[what] = max(grown[what], max(warm) - warm[0])
    return grown


def _tell(folder: Folder, over: threading.Event, say) -> None:
    while not over.wait(_TELL_SECONDS):
        steps, kills = folder.noted("steps"), folder.noted("kills")
        done = steps[-1]["done"] if steps else 0
        usage = measure_here()
        say(
            f"{done} steps, {len(kills)} kills; the launcher: "
            f"{usage['kilobytes'] >> 10} MiB, {usage['descriptors']} descriptors"
        )


def measure_here() -> dict[str, int]:
    """What this process uses."""
    status = Path("/proc/self/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {"kilobytes": int(rss.split()[1]), "descriptors": len(os.listdir("/proc/self/fd"))}


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "gradwire" in name}
