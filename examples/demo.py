"""`make demo`: train a small model that is split over three worker processes, and check it.

It shows a progress bar with the loss, then the gradients of the three workers beside those of one
process, then the time of a step. The printed gradients are also asserted.
"""

import os
import shutil
import statistics
import sys
import textwrap
import time
from contextlib import contextmanager

import torch
from torch import nn

import gradwire

try:
    from rich import progress as rich_progress
except ImportError:  # then the bar is plain text
    rich_progress = None

STEPS, POINTS, WIDTH = 300, 512, 32
SHAPES = [(2, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
torch.set_num_threads(1)  # three processes share a machine that may be small


class Part(nn.Module):
    """A third of the model, with its own optimizer."""

    def __init__(self, n):
        super().__init__()
        torch.manual_seed(n)
        self.linear = nn.Linear(*SHAPES[n])
        self.last = n == len(SHAPES) - 1
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        self.used = []

    def forward(self, x):
        return self.linear(x) if self.last else torch.tanh(self.linear(x))

    def learn(self):
        """Take a step, and keep its gradients."""
        self.used = [parameter.grad for parameter in self.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self):
        return self.used

    def weights(self):
        return self.state_dict()


def step_on_workers(parts, x, y):
    for part in parts:
        x = part.rpc_sync().forward(x)
    loss = nn.functional.binary_cross_entropy_with_logits(x, y)
    loss.backward()
    torch.futures.wait_all([part.rpc_async().learn() for part in parts])
    return loss.item()


def step_in_one_process(parts, x, y):
    for part in parts:
        x = part(x)
    loss = nn.functional.binary_cross_entropy_with_logits(x, y)
    loss.backward()
    for part in parts:
        part.learn()
    return loss.item()


def two_spirals():
    """Points of two interleaved spirals, and their labels."""
    arm = torch.arange(POINTS) % 2
    turn = torch.linspace(0.5, 3.0, POINTS) * torch.pi
    angle, radius = turn + arm * torch.pi, turn / (3 * torch.pi)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm[:, None].float()


# -- output


def columns():
    return shutil.get_terminal_size().columns


@contextmanager
def progress():
    """A progress bar; the block gets a function that shows a loss."""
    if not sys.stdout.isatty():
        yield print_now_and_then()
    elif rich_progress is None:
        yield draw_bar()
        print()
    else:
        bar, end = rich_progress.BarColumn(bar_width=None), "{task.completed:3}/{task.total}"
        with rich_progress.Progress(bar, end, "loss {task.fields[loss]:.4f}", expand=True) as live:
            task = live.add_task("", total=STEPS, loss=float("nan"))
            yield lambda loss: live.update(task, advance=1, loss=loss)


def print_now_and_then():
    losses = []

    def show(loss):
        losses.append(loss)
        if len(losses) == 1 or len(losses) % (STEPS // 10) == 0:
            print(f"  step {len(losses):3}/{STEPS}  loss {loss:.4f}")

    return show


def draw_bar():
    losses = []

    def show(loss):
        losses.append(loss)
        numbers = f" {len(losses):3}/{STEPS}  loss {loss:.4f}"
        room = max(0, columns() - len(numbers) - 3)
        filled = "#" * (room * len(losses) // STEPS)
        print(f"\r[{filled:-<{room}}]{numbers}", end="", flush=True)

    return show


def say(text):
    print(textwrap.fill(text, min(columns(), 80)) + "\n")


def print_row(on, *cells):
    """Four columns that also fit a narrow terminal."""
    print(f"{on:<3} " + " ".join(f"{cell:>13}" for cell in cells[:2]) + f" {cells[-1]:>8}")


# -- the demonstration


def train(parts, step, points, show):
    """The losses, and the median seconds of a step."""
    losses, seconds = [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        losses.append(step(parts, *points))
        seconds.append(time.perf_counter() - begin)
        show(losses[-1])
    return losses, statistics.median(seconds)


def compare_gradients(parts, local, points):
    """One more step from the same weights, on the workers and here; returns both gradients."""
    for part, twin in zip(parts, local, strict=True):
        twin.load_state_dict(part.rpc_sync().weights())
    step_on_workers(parts, *points)
    step_in_one_process(local, *points)
    say("The gradients of the next step (their norm), and those of the same step in one process:")
    print_row("on", "three workers", "one process", "off by")
    differences = []
    for part, twin in zip(parts, local, strict=True):
        found = torch.cat([gradient.flatten() for gradient in part.rpc_sync().gradients()])
        wanted = torch.cat([gradient.flatten() for gradient in twin.gradients()])
        differences.append((found - wanted).abs().max().item())
        assert differences[-1] <= 1e-6 * wanted.norm()
        numbers = f"{found.norm():.9f}", f"{wanted.norm():.9f}", f"{differences[-1]:.1e}"
        print_row(part.owner_name(), *numbers)
    print()
    say(f"Largest difference of any gradient: {max(differences):.1e}.")


def main():
    say("Three processes, each with a third of a model that learns to tell two spirals apart:")
    parts = [gradwire.remote(f"w{n}", Part, args=(n,)) for n in range(len(SHAPES))]
    points = two_spirals()
    with progress() as show:
        losses, on_workers = train(parts, step_on_workers, points, show)
    print()
    say(f"The loss fell from {losses[0]:.4f} to {losses[-1]:.4f}.")
    assert losses[-1] < losses[0] / 2

    local = [Part(n) for n in range(len(SHAPES))]
    _, in_one_process = train(local, step_in_one_process, points, lambda loss: None)
    compare_gradients(parts, local, points)

    print(f"A step on three workers   {on_workers * 1000:8.2f} ms")
    print(f"A step in one process     {in_one_process * 1000:8.2f} ms")
    print()
    say(
        f"(Median of {STEPS} steps: forward, backward, optimizers, on {os.cpu_count()} cores. On "
        "three workers a step makes 6 calls, and its backward pass crosses between the processes "
        "again; the model itself is small.)"
    )


if __name__ == "__main__":
    gradwire.run(main, world_size=len(SHAPES))
