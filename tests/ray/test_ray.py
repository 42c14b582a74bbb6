"""gradwire on Ray: drivers are scripts of their own, as users write them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.ray.conftest import ROOT

pytestmark = [
    pytest.mark.needs_ray,
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(300),
]

EXAMPLE = (ROOT / "examples" / "03_pipeline.py").read_text()


def losses(text: str) -> list[str]:
    return re.findall(r"(?:loss|in one process) (-?0x[\w.+-]+)", text)


def test_an_example_gives_the_same_losses_to_the_bit_as_by_itself(one_node):
    exact = EXAMPLE.replace("{loss.item():.9f}", "{loss.item().hex()}")
    exact = exact.replace("{expected.item():.9f}", "{expected.item().hex()}")
    on_ray = exact.replace("gradwire.run(main, world_size=3)", "gradwire.ray.run(main, workers=3)")
    assert exact != on_ray

    there, here = losses(one_node.run(on_ray)), losses(one_node.run(exact))

    assert len(there) == 2
    assert there == here
    assert one_node.ask("left") == "[]"


def test_without_ray_the_error_says_what_to_install():
    program = "import sys; sys.modules['ray'] = None; import gradwire; gradwire.ray"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert "UsageError: gradwire.ray needs the library ray" in done.stderr
    assert "pip install 'gradwire[ray]'" in done.stderr
