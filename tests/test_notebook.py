"""The notebook among the examples, in a kernel and by its cells alone; and its guide."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "11_notebook.ipynb"
HAS_KERNEL = all(map(importlib.util.find_spec, ("nbclient", "ipykernel", "cloudpickle")))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("cloudpickle") is None, reason="cloudpickle is not installed"
    ),
]

# In a process of its own: nbclient starts an event loop and sockets.
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

manager = AsyncKernelManager()
manager._kernel_spec = KernelSpec(
    argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
)
book = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(book, timeout=100, km=manager).execute()
for cell in book.cells:
    for output in cell.get("outputs", ()):
        print(output.get("name", output.output_type), output.get("text", "").strip())
"""


def cells() -> list[str]:
    return [
        "".join(cell["source"])
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.skipif(not HAS_KERNEL, reason="nbclient and ipykernel are not installed")
@pytest.mark.usefixtures("no_secret")
def test_the_notebook_runs_in_a_kernel(tmp_path):
    directories = {f"JUPYTER_{kind}_DIR": str(tmp_path) for kind in ("CONFIG", "DATA", "RUNTIME")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXECUTE, str(NOTEBOOK)],
        env=os.environ | directories | {"IPYTHONDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    *_, loss, norms = done.stdout.splitlines()
    assert loss.startswith("stdout loss ")
    assert norms == "stdout 2.0 1.0 -3"
    assert "stderr" not in done.stdout


@pytest.mark.usefixtures("no_secret")
def test_its_cells_run_without_a_kernel():
    run = f"for cell in {cells()!r}: exec(compile(cell, '<cell>', 'exec'), globals())"
    done = subprocess.run(
        [sys.executable, "-c", run], capture_output=True, text=True, timeout=110, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "2.0 1.0 -3"


def test_the_notebook_is_stored_without_what_it_printed():
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    outputs = [cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code"]

    assert not any(outputs)
    assert len(outputs) == len(cells()) > 5


GUIDE = Path(__file__).parents[1] / "docs" / "guide" / "interactive.md"


@pytest.mark.usefixtures("no_secret")
def test_the_guide_runs_from_its_first_line_to_its_last():
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    expected = re.findall(r"^print\(.*\)  # (.*)$", "".join(blocks), re.M)

    done = subprocess.run(
        [sys.executable, "-"],
        input="\n".join(blocks),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == expected
    assert len(expected) == 3
