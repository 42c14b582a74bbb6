"""A trace in a simulated world: one seed, one trace."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.seeing.perfetto import perfetto
from tests.simulate import simulate

pytestmark = pytest.mark.slow


def traced_step():
    x = torch.ones(2, requires_grad=True)
    with gw.trace(show=False) as trace:
        y = gw.rpc_sync("w1", torch.mul, args=(x, 3))
        waited = gw.rpc_async("w2", torch.sin, args=(y,))
        waited.wait().sum().backward()
    return trace.text, perfetto(trace.timeline, trace.path), trace.timeline


def names_without_process(content):
    return [row for row in content["traceEvents"] if row["name"] != "process_name"]


def test_one_seed_gives_one_trace():
    first, second = (simulate(traced_step, workers=3, seed=5).result for _ in range(2))

    assert first[0] == second[0]
    assert names_without_process(first[1]) == names_without_process(second[1])


def test_it_is_in_simulated_time():
    text, _, timeline = simulate(traced_step, workers=3, seed=5).result

    crossed = {(arrow.way, arrow.source.worker, arrow.target.worker) for arrow in timeline.arrows}
    assert {("call", "w0", "w1"), ("call", "w0", "w2"), ("gradient", "w0", "w2")} <= crossed
    assert all(arrow.left < arrow.came for arrow in timeline.arrows if arrow.way == "gradient")
    assert "(one clock)" in text
