"""The arguments of torch's init_rpc, given to ours."""

from __future__ import annotations

import pytest
import torch.distributed.rpc as stock

import gradwire
from gradwire import Options, Timeouts, UsageError
from gradwire.compat.rpc.options import TensorPipeRpcBackendOptions
from gradwire.options import FOREVER
from gradwire.rpc.api import options_for


@pytest.mark.parametrize(
    "kind", [stock.TensorPipeRpcBackendOptions, TensorPipeRpcBackendOptions], ids=["torch", "ours"]
)
def test_what_has_a_meaning_here_is_taken_over(kind):
    given = kind(init_method="tcp://h:1", rpc_timeout=7, num_worker_threads=3)

    got = options_for(stock.BackendType.TENSORPIPE, given, None)

    assert got == Options(init_method="tcp://h:1", timeouts=Timeouts(call=7.0), threads=3)
    assert options_for(None, kind(rpc_timeout=0), None).timeouts.call == FOREVER


def test_without_them_the_options_are_those_given():
    mine = Options(threads=5)

    assert options_for(None, None, mine) is mine
    assert options_for("TENSORPIPE", None, None) == Options()


def test_a_worker_joins_with_the_arguments_of_torch(tmp_path):
    given = stock.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/meeting")

    gradwire.init_rpc(
        "alone",
        backend=stock.BackendType.TENSORPIPE,
        rank=0,
        world_size=1,
        rpc_backend_options=given,
    )
    try:
        assert gradwire.rpc_sync("alone", abs_of, args=(-3,)) == 3
    finally:
        gradwire.shutdown()


@gradwire.expose
def abs_of(n):
    return abs(n)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "GLOO"}, "has no backend 'GLOO': there is only one\nhint: omit backend="),
        (
            {"rpc_backend_options": {"rpc_timeout": 3}},
            "takes the options of torch.distributed.rpc, not a dict\nhint: pass options=gradwire.O",
        ),
        (
            {"rpc_backend_options": TensorPipeRpcBackendOptions(), "options": Options()},
            "takes options= or rpc_backend_options=, not both\nhint: pass options=gradwire.Options",
        ),
    ],
)
def test_what_has_none_is_refused_with_the_way_to_say_it(arguments, message):
    with pytest.raises(UsageError, match=message):
        gradwire.init_rpc("w0", rank=0, world_size=1, **arguments)


def test_a_rank_of_minus_one_is_none_as_in_torch(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    with pytest.raises(UsageError, match="does not know its rank"):
        gradwire.init_rpc("w0", rank=-1, world_size=1)


def test_torchs_order_of_arguments_is_recognised():
    with pytest.raises(UsageError, match=r"rank=.*TENSORPIPE.*not a number\nhint: it is init_rpc"):
        gradwire.init_rpc("w0", stock.BackendType.TENSORPIPE, 0, 1)
