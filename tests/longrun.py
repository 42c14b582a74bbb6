"""Many steps over three processes without a context: python -m tests.longrun --steps 10000

Memory, tables and time must not grow with the steps. With --keep the state is never detached, and
one backward runs through all steps: its time must grow no faster than their number.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch

import gradwire
from gradwire import Options, Timeouts
from tests.process_cluster import Hosts, process_cluster
from tests.processes import far
from tests.progress import Progress

MARKS = 5
NAMES = ("w0", "w1", "w2")


def show(progress: Progress, steps: int, seconds: float) -> None:
    tables = [gradwire.rpc_sync(name, far.edges_alive) for name in NAMES]
    sizes = [gradwire.rpc_sync(name, far.peak_megabytes) for name in NAMES]
    alive = ", ".join(f"{one['sent']}+{one['received']}" for one in tables)
    megabytes = ", ".join(map(str, sizes))
    progress.say(f"{steps:7} steps: {1e3 * seconds:.2f} ms each, {megabytes} MB, edges {alive}")


def separate_steps(steps: int, progress: Progress) -> None:
    x = torch.ones(64, requires_grad=True)
    began, each = time.perf_counter(), steps // MARKS
    for step in range(1, steps + 1):
        x.grad = None
        gradwire.rpc_sync("w1", far.doubled_along, args=(["w2"], x)).sum().backward()
        progress.advance()
        if step % each == 0:
            show(progress, step, (time.perf_counter() - began) / each)
            began = time.perf_counter()


def one_graph(steps: int, progress: Progress) -> None:
    weight = torch.ones(64, requires_grad=True)
    began, each, last = time.perf_counter(), steps // MARKS, weight
    for step in range(1, steps + 1):
        last = gradwire.rpc_sync("w1", far.grown, args=(weight, torch.ones(64)))
        progress.advance()
        if step % each == 0:
            show(progress, step, (time.perf_counter() - began) / each)
            began = time.perf_counter()
    began = time.perf_counter()
    last.sum().backward()
    took = time.perf_counter() - began
    progress.say(
        f"backward: {took:.2f} s, {1e3 * took / steps:.3f} ms a step, {weight.grad[0].item():.6f}"
    )
    gradwire.rpc_sync("w1", far.forget_state)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.longrun")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--keep", action="store_true", help="one graph over all steps")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    options = Options(listen="unix", timeouts=Timeouts(call=600, backward=600))
    with (
        Hosts(0) as hosts,
        process_cluster(3, expose=[far], options=options, hosts=hosts),
        Progress(asked.steps, "steps") as progress,
    ):
        (one_graph if asked.keep else separate_steps)(asked.steps, progress)
    return 0


if __name__ == "__main__":
    sys.exit(main())
