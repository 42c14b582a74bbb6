"""Begin and end as a program of torch.distributed.rpc does, in one process."""

from __future__ import annotations

import pytest

from gradwire.compat import rpc as world
from gradwire.compat.rpc import agent as agents
from gradwire.compat.rpc import api, backend_registry
from gradwire.compat.rpc.backend_registry import BackendType
from gradwire.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from gradwire.options import FOREVER


class Foreign(RpcBackendOptions):
    def __init__(self):
        RpcBackendOptions.__init__(self)


@pytest.fixture
def options(tmp_path):
    return TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/meeting")


@pytest.fixture(autouse=True)
def nobody_is_left():
    yield
    if world._is_current_rpc_agent_set():
        world.shutdown(graceful=False)


def test_a_world_of_one(options):
    world.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)

    assert world.get_worker_info() == world.get_worker_info("me") == world.get_worker_info(0)
    assert world.get_worker_info().id == 0
    agent = world._get_current_rpc_agent()
    assert isinstance(agent, world.TensorPipeAgent)
    assert agent.is_static_group
    assert agent.store is not None
    assert agent._get_backend_options() is options
    assert agent._get_device_map(world.get_worker_info()) == {}
    assert api._all_gather(7) == {"me": 7}
    api._barrier(["me"])
    world.shutdown()
    assert not world._is_current_rpc_agent_set()


def test_a_peer_that_calls_before_init_has_returned_does_not_change_its_options(
    options, monkeypatch
):
    options.rpc_timeout = 0.5
    monkeypatch.setattr(agents, "_greet", agents.TensorPipeAgent.over)  # what its call makes

    world.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)

    assert world.get_rpc_timeout() == 0.5
    assert world._get_current_rpc_agent()._get_backend_options() is options


@pytest.mark.parametrize(
    "function", [world.shutdown, world.get_worker_info, lambda: api._all_gather(1)]
)
def test_without_init_nothing_goes(function):
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized. Call torch.distribu"):
        function()


def test_a_second_init_is_refused(options):
    world.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)

    with pytest.raises(RuntimeError, match="is already initialized"):
        world.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    with pytest.raises(RuntimeError, match="is already initialized"):
        world._init_rpc_backend(
            BackendType.TENSORPIPE, world._get_current_rpc_agent().store, "x", 0, 1, options
        )


def test_again_and_again_under_other_names_and_ranks(tmp_path):
    for n in range(6):
        options = TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/{n}")
        size = 1 if n % 2 else None
        rank = 0 if size else n
        world.init_rpc(f"w-{n}", rank=rank, world_size=size, rpc_backend_options=options)
        assert world.get_worker_info().id == rank
        assert world._get_current_rpc_agent().is_static_group == bool(size)
        world.shutdown()


def test_wrong_types_are_refused(options):
    with pytest.raises(TypeError, match="Argument backend must be a member of BackendType"):
        world.init_rpc("a", backend="TENSORPIPE", rank=0, world_size=1)
    with pytest.raises(TypeError, match="Argument rpc_backend_options must be an instance of Rpc"):
        world.init_rpc("a", rank=0, world_size=1, rpc_backend_options={})
    with pytest.raises(TypeError, match="Could not infer backend for options"):
        world.init_rpc("a", rank=0, world_size=1, rpc_backend_options=Foreign())
    with pytest.raises(RuntimeError, match="Argument x must be of type"):
        world._init_rpc_backend(BackendType.TENSORPIPE, "x", "a", 0, 1, options)


def test_options_of_another_backend_are_refused(tmp_path):
    options = Foreign()
    options.init_method = f"file://{tmp_path}/meeting"

    with pytest.raises(TypeError, match="must be a `TensorPipeRpcBackendOptions`"):
        world.init_rpc("a", BackendType.TENSORPIPE, 0, 1, options)


def test_who_joins_an_open_world_says_its_rank(options, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    for place in (options.init_method, "tcp://127.0.0.1:23456"):
        with pytest.raises(ValueError, match="rank parameter missing"):
            world.init_rpc("a", rpc_backend_options=TensorPipeRpcBackendOptions(init_method=place))
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        world.init_rpc("a")


def test_a_name_that_cannot_be_spoken_is_refused(options):
    with pytest.raises(RuntimeError, match="shorter than 128"):
        world.init_rpc("a b", rank=0, world_size=1, rpc_backend_options=options)


def test_a_backend_of_ones_own_is_asked_and_started(options, monkeypatch):
    before = BackendType._known
    started = []
    monkeypatch.setattr(api, "_set_and_start_rpc_agent", started.append)
    mine = backend_registry.register_backend(
        "OWN", lambda rpc_timeout, init_method: Foreign(), lambda **given: given["name"]
    )
    try:
        world.init_rpc("n", backend=mine, rank=0, world_size=1, rpc_backend_options=options)
    finally:
        BackendType._known = before

    assert started == ["n"]


def test_timeouts_of_calls(options):
    options.rpc_timeout = 0.5
    world.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)

    assert world.get_rpc_timeout() == api.patience(-1) == 0.5
    assert api.patience(3) == 3
    assert api.patience(0) == FOREVER
    world._set_rpc_timeout(100)
    assert world.get_rpc_timeout() == 100


def test_debug_info_is_text(tmp_path):
    options = TensorPipeRpcBackendOptions(
        init_method=f"file://{tmp_path}/meeting", num_worker_threads=27
    )
    world.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    agent = world._get_current_rpc_agent()

    info = agent.get_debug_info()
    assert info["agent.thread_pool_size"] == "27"
    assert info["agent.client_active_calls"] == "0"
    assert "agent.gil_average_wait_time_us" not in info
    world.enable_gil_profiling(True)
    assert agent.get_debug_info().keys() - info.keys() == {"agent.gil_average_wait_time_us"}


def test_a_map_to_a_worker_that_there_is_not(options):
    options.set_device_map("nobody", {"cpu": "cpu"})

    with pytest.raises(ValueError, match="Node me has invalid target node names"):
        world.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    assert not world._is_current_rpc_agent_set()


def test_a_destination_is_a_name_a_number_or_an_info(options):
    world.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)

    assert api._to_worker_info("me") == api._to_worker_info(world.get_worker_info())
    with pytest.raises(ValueError, match=r"Cannot get WorkerInfo from name 1\.5"):
        api._to_worker_info(1.5)
    with pytest.raises(RuntimeError, match="could not find destination name nope"):
        api._to_worker_info("nope")
