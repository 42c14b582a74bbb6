"""Does a host thread wait for the device while CUDA tensors cross? python -m tests.streams.waits

Two worker processes run calls, passes, references and optimizer steps on one GPU, each under
torch's profiler, which records every call into CUDA. A run without any of these is subtracted: the
profiler itself waits for the device when it begins and ends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections import Counter
from multiprocessing.queues import Queue
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import gradwire as gw
from gradwire import Options
from gradwire.agent.peers.secret import write_secret

SIZE = 1 << 20
DEVICE_WIDE = {"cudaDeviceSynchronize", "cuCtxSynchronize"}


def same(x: torch.Tensor) -> torch.Tensor:
    """The called function."""
    return x


def scaled(weight: gw.RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Runs where the weight is."""
    return x * weight.local_value()


def make_weight() -> torch.Tensor:
    """A leaf on the GPU."""
    return torch.ones(SIZE, device="cuda:0", requires_grad=True)


def step(weight: gw.RRef[torch.Tensor], optimizer: gw.DistributedOptimizer) -> None:
    """Every way of a CUDA tensor between the two."""
    x = torch.ones(SIZE, device="cuda:0", requires_grad=True)
    gw.rpc_sync("w1", same, args=(x.detach(),))
    futures = [gw.rpc_async("w1", same, args=(x.detach(),)) for _ in range(3)]
    for future in futures:
        future.wait()
    weight.to_here()
    gw.rpc_sync("w1", scaled, args=(weight, x)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def work(rank: int, folder: str, steps: int, counts: Queue[tuple[int, Counter[str]]]) -> None:
    """One of the two processes; reports how often it has called each function of CUDA."""
    torch.cuda.init()
    options = Options(init_method=f"file://{folder}/meet", secret=f"{folder}/secret")
    gw.init_rpc(f"w{rank}", rank, 2, options, expose=[same, scaled, make_weight])
    if rank == 0:
        weight = gw.remote("w1", make_weight)
        optimizer = gw.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
        for _ in range(3):  # blocks are made, and the driver is warm
            step(weight, optimizer)
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        if rank == 0:
            for _ in range(steps):
                step(weight, optimizer)
            torch.cuda.synchronize()
            del weight, optimizer
        gw.shutdown()
    names = Counter(str(event.name) for event in record.events())
    counts.put((rank, Counter({name: n for name, n in names.items() if name.startswith("cu")})))


def counted(steps: int) -> dict[int, Counter[str]]:
    """How often each worker calls each function of CUDA in so many steps."""
    context = multiprocessing.get_context("spawn")
    counts: Queue[tuple[int, Counter[str]]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        write_secret(Path(folder, "secret"))
        both = [context.Process(target=work, args=(n, folder, steps, counts)) for n in range(2)]
        for process in both:
            process.start()
        found = dict(counts.get(timeout=120) for _ in both)
        for process in both:
            process.join(60)
    return found


def main() -> int:
    """Print both tables; 1 if a thread has waited for a whole device, or nothing was recorded."""
    parser = argparse.ArgumentParser(prog="python -m tests.streams.waits")
    parser.add_argument("--steps", type=int, default=30)
    steps: int = parser.parse_args().steps
    without, with_steps = counted(0), counted(steps)
    waits, launches = 0, 0
    for rank in (0, 1):
        more = with_steps[rank] - without[rank]
        calls = ", ".join(f"{n} {name}" for name, n in more.most_common())
        print(f"w{rank}, {steps} steps: {calls}")
        waits += sum(more[name] for name in DEVICE_WIDE)
        launches += more["cudaLaunchKernel"] + more["cudaMemcpyAsync"]
    print(f"{waits} waits for a whole device, {launches} kernels and copies")
    return 0 if waits == 0 < launches else 1


if __name__ == "__main__":
    sys.exit(main())
