"""What a profiler in another process sees of the calls that it serves."""

from __future__ import annotations

import torch

import gradwire
from tests.processes import far


def test_a_worker_s_profile_names_what_it_runs_for_others(workers):
    x = torch.ones(3, requires_grad=True)
    gradwire.rpc_sync("w1", far.profile_yourself)
    with gradwire.context() as context:
        y = gradwire.rpc_sync("w1", far.cubed, args=(x,))
        gradwire.backward(context, [y.sum()])
    names = gradwire.rpc_sync("w1", far.profiled)

    assert names.index("cubed") < names.index("aten::pow")
    assert [name for name in names if name.startswith("gradwire backward p0.")]


def test_a_call_inside_a_call_is_named_where_it_is_made(workers):
    gradwire.rpc_sync("w1", far.profile_yourself)
    gradwire.rpc_sync("w1", far.through, args=(["w2"], torch.ones(1)))

    names = gradwire.rpc_sync("w1", far.profiled)

    assert "through" in names
    assert "rpc_sync#through(w1 -> w2)" in names
