"""Workers in processes of their own, each with a certificate of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gradwire
from gradwire import Options, UsageError
from gradwire.current import current_worker
from tests.certificates import job
from tests.processes import far
from tests.processes.conftest import TIMEOUTS

WORLD = 2


def _learn(name, rank, options):
    """In a process of its own: a forward and a backward through the other worker; the gradients and
    the links.
    """
    gradwire.init_rpc(name, rank, WORLD, options, expose=[far])
    try:
        x = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
        layer = gradwire.remote(f"w{1 - rank}", far.Layer, args=(2.0 + rank,))
        with gradwire.context():
            layer.rpc_sync().forward(x.sin()).square().sum().backward()
        return x.grad.tolist(), layer.rpc_sync().gradient().item(), _links()
    finally:
        gradwire.shutdown()


def _links():
    connections = current_worker.find().agent._connections
    channels = [channel for known in connections.channels.values() for channel in known]
    return {(channel.remote.partition("://")[0], channel.peer_names) for channel in channels}


def _alone(weight):
    x = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
    layer = far.Layer(weight)
    layer(x.sin()).square().sum().backward()
    return x.grad.tolist(), layer.weight.grad.item()


def test_a_graph_over_tls_is_the_graph_of_one_process(hosts, tmp_path):
    options = Options(
        init_method=f"file://{tmp_path}/meeting", listen="tcp://127.0.0.1:0", timeouts=TIMEOUTS
    )
    for rank, host in enumerate(hosts.take(WORLD)):
        mine = replace(options, tls=job().tls(f"w{rank}"))
        host.begin(_learn, f"w{rank}", rank, mine)

    for rank, host in enumerate(hosts.take(WORLD)):
        *found, links = host.finish()
        assert tuple(found) == _alone(2.0 + rank)
        assert links == {("tls", (f"w{1 - rank}",))}


def test_a_worker_cannot_join_with_the_certificate_of_another(tmp_path):
    options = Options(
        init_method=f"file://{tmp_path}/meeting", listen="tcp://127.0.0.1:0", tls=job().tls("w1")
    )
    with pytest.raises(UsageError, match="w0 has a certificate for w1"):
        gradwire.init_rpc("w0", 0, 1, options)
