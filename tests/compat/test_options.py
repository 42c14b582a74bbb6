"""The option classes, and what the worker makes of them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from gradwire.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from gradwire.options import FOREVER

CUDA0, CUDA1, CUDA2 = (torch.device("cuda", n) for n in range(3))


def test_the_defaults_are_those_of_torch():
    options = TensorPipeRpcBackendOptions()

    assert (options.num_worker_threads, options.rpc_timeout, options.init_method) == (
        16,
        60.0,
        "env://",
    )
    assert (options.device_maps, options.devices) == ({}, [])
    assert isinstance(options, RpcBackendOptions)


def test_the_base_class_is_made_to_be_derived_from():
    class Mine(RpcBackendOptions):
        def __init__(self, place):
            RpcBackendOptions.__init__(self)
            self.init_method = place

    assert (Mine("tcp://x:1").init_method, Mine("x").rpc_timeout) == ("tcp://x:1", 60.0)


def test_options_are_given_by_name():
    with pytest.raises(TypeError):
        TensorPipeRpcBackendOptions(8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rpc_timeout": timedelta(seconds=1)},
        {"rpc_timeout": "1"},
        {"init_method": 7},
        {"num_worker_threads": 1.5},
    ],
)
def test_what_has_a_wrong_type_is_refused(wrong):
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        TensorPipeRpcBackendOptions(**wrong)


def test_a_worker_gets_the_timeout_threads_and_place():
    options = TensorPipeRpcBackendOptions(
        rpc_timeout=7, num_worker_threads=3, init_method="file:///x"
    ).for_worker()

    assert (options.timeouts.call, options.threads, options.init_method) == (7, 3, "file:///x")


def test_a_timeout_of_nothing_is_long_and_finite():
    assert TensorPipeRpcBackendOptions(rpc_timeout=0).for_worker().timeouts.call == (FOREVER)


def test_device_maps_are_made_of_devices():
    options = TensorPipeRpcBackendOptions(device_maps={"b": {0: "cuda:1"}}, devices=[0, "cuda:1"])
    options.set_device_map("b", {1: 2})
    options.set_device_map("c", {"cuda:0": 0})

    assert options.device_maps == {"b": {CUDA0: CUDA1, CUDA1: CUDA2}, "c": {CUDA0: CUDA0}}
    assert options.devices == [CUDA0, CUDA1]


def test_a_device_is_mapped_once():
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping"):
        TensorPipeRpcBackendOptions(device_maps={"b": {0: 1, 1: 1}})
    options = TensorPipeRpcBackendOptions(device_maps={"b": {0: 1}})
    options.set_device_map("b", {0: 1})
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping"):
        options.set_device_map("b", {0: 2})


def test_the_devices_of_a_worker_are_cuda_devices():
    with pytest.raises(ValueError, match="`set_devices` expect a list of CUDA devices"):
        TensorPipeRpcBackendOptions().set_devices(["cpu"])


@pytest.mark.parametrize(("said", "is_insecure"), [("1", True), ("0", False), ("", False)])
def test_a_program_may_be_told_from_outside_to_go_beyond_this_machine(
    said, is_insecure, monkeypatch
):
    monkeypatch.setenv("GRADWIRE_INSECURE", said)

    assert TensorPipeRpcBackendOptions().for_worker().insecure is is_insecure
