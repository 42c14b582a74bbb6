"""A pipeline: three stages on three workers, with several micro-batches in flight.

`remote` returns a reference before the stage has run. So the loop in `pipelined` starts all work
without waiting, and each stage fetches its input from the stage before it. While w2 works on one
micro-batch, w1 can work on the next and w0 on the one after that.
"""

import threading
import time

import torch
from torch import nn

import gradwire

MICRO_BATCHES, WIDTH = 8, 256
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # a stage works on one core, so that stages can work side by side


class Stage(nn.Module):
    """A third of the model. It lives on one worker and takes the micro-batches in turn."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.turn = threading.Condition()
        self.times = []
        self.compute(torch.zeros(1, WIDTH))  # warm up: the first run is slow

    def forward(self, n, x):
        x = x.to_here()
        with self.turn:
            self.turn.wait_for(lambda: len(self.times) == n)
            begin = time.monotonic()
            y = self.compute(x)
            self.times.append((begin, time.monotonic()))
            self.turn.notify_all()
        return y

    def compute(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def gradients(self):
        return [parameter.grad for parameter in self.parameters()]

    def forward_times(self):
        return self.times


def pipelined(stages, batch):
    outputs = []
    for n, x in enumerate(batch.chunk(MICRO_BATCHES)):
        h = stages[0].remote().forward(n, gradwire.RRef(x))
        h = stages[1].remote().forward(n, h)
        outputs.append(stages[2].rpc_async().forward(n, h))
    return torch.cat([output.wait() for output in outputs]).square().mean()


def draw(stages, columns=60):
    """When each stage worked: a row for each worker, a digit for the micro-batch."""
    rows = [stage.rpc_sync().forward_times() for stage in stages]
    begin, end = rows[0][0][0], rows[-1][-1][1]
    for stage, row in zip(stages, rows, strict=True):
        cells = ["."] * columns
        for n, times in enumerate(row):
            first, last = (int((t - begin) / (end - begin) * (columns - 1)) for t in times)
            cells[first : last + 1] = str(n) * (last + 1 - first)
        print(f"{stage.owner_name()}  {''.join(cells)}")
        assert len(row) == MICRO_BATCHES


def main():
    stages = [gradwire.remote(f"w{n}", Stage, args=(n,)) for n in range(3)]
    assert all(stage.rpc_sync().forward_times() == [] for stage in stages)  # all exist
    batch = torch.randn(128 * MICRO_BATCHES, WIDTH)
    loss = pipelined(stages, batch)
    loss.backward()
    print("the micro-batches, over time:")
    draw(stages)

    local = [Stage(n) for n in range(3)]  # the same model, in one process
    expected = local[2].compute(local[1].compute(local[0].compute(batch))).square().mean()
    expected.backward()
    found = [gradient for stage in stages for gradient in stage.rpc_sync().gradients()]
    wanted = [gradient for stage in local for gradient in stage.gradients()]
    largest = max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
    print(f"loss {loss.item():.9f}, in one process {expected.item():.9f}")
    print(f"{len(found)} gradients, largest difference {largest:.1e}")
    torch.testing.assert_close(loss, expected)
    assert largest < 1e-12


if __name__ == "__main__":
    gradwire.run(main, world_size=3)
