"""Programs of torch.distributed.rpc over processes: who meets, who leaves, who waits for whom."""

from __future__ import annotations

import os
import socket

import pytest
import torch

import gradwire
from gradwire.compat import rpc as world
from gradwire.compat.profiler_legacy import profile
from gradwire.compat.rpc import api
from gradwire.compat.rpc.options import TensorPipeRpcBackendOptions
from gradwire.rpc.join import _last_store
from tests.processes import far

WORLD = 3


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _join(rank, url, size=WORLD, name="worker-{}"):
    options = TensorPipeRpcBackendOptions(init_method=url, rpc_timeout=30)
    world.init_rpc(name.format(rank), rank=rank, world_size=size, rpc_backend_options=options)


def _alike(rank, url, environment, times):
    """In a process of its own: join, wait for each other, leave; several times."""
    os.environ.update(environment)
    heard = []
    try:
        for _ in range(times):
            _join(-1 if environment else rank, url, name=f"worker-{rank}")
            api._barrier([f"worker-{n}" for n in range(1, WORLD)] if rank else ["worker-0"])
            heard.append(api._all_gather(rank))
            world.shutdown()
    finally:
        for variable in environment:
            del os.environ[variable]
    return heard


@pytest.mark.parametrize("meeting", ["env", "tcp", "file"])
def test_workers_meet_wait_and_leave_again_and_again(hosts, tmp_path, meeting):
    port = _free_port()
    url = {
        "env": "env://",
        "tcp": f"tcp://127.0.0.1:{port}",
        "file": f"file://{tmp_path}/meeting",
    }[meeting]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}

    def environment(rank):
        return {**given, "RANK": str(rank)} if meeting == "env" else {}

    for rank, host in enumerate(hosts.take(WORLD - 1), 1):
        host.begin(_alike, rank, url, environment(rank), 2)
    heard = [_alike(0, url, environment(0), 2), *(h.finish() for h in hosts.take(WORLD - 1))]

    everyone = {f"worker-{rank}": rank for rank in range(WORLD)}
    assert heard == [[everyone] * 2] * WORLD


def _leave_by(rank, url, patched):
    """In a process of its own: join and leave, with functions of this process's `api` replaced;
    what came.
    """
    _join(rank, url)
    before = {name: getattr(api, name) for name in patched}
    for name, make in patched.items():
        setattr(api, name, make(before[name]))
    try:
        world.shutdown()
    except RuntimeError as error:
        return str(error)
    finally:
        for name, function in before.items():
            setattr(api, name, function)
    return "left"


def _and_fails(function):
    def failing(*args):
        function(*args)
        raise RuntimeError("the program says no")

    return failing


def _fails(_):
    def failing():
        raise RuntimeError("nothing is let go")

    return failing


def test_what_a_program_replaces_is_called(hosts, tmp_path):
    url = f"file://{tmp_path}/meeting"
    replaced = {
        "_broadcast_to_followers": _and_fails,
        "_delete_all_user_and_unforked_owner_rrefs": _fails,
    }
    for rank, host in enumerate(hosts.take(WORLD - 1), 1):
        host.begin(_leave_by, rank, url, replaced)

    assert "timed out in _all_gather" in _leave_by(0, url, {})
    assert [host.finish() for host in hosts.take(WORLD - 1)] == ["nothing is let go"] * 2
    assert not world._is_current_rpc_agent_set()


def _leak(rank, url, ignore):
    """In a process of its own: leave while another holds a reference that is not let go."""
    _join(rank, url)
    before = api._ignore_rref_leak, api._delete_all_user_and_unforked_owner_rrefs
    api._ignore_rref_leak = ignore
    api._delete_all_user_and_unforked_owner_rrefs = lambda: None
    kept = api.remote(f"worker-{(rank + 1) % WORLD}", torch.add, args=(torch.ones(2), 1))
    try:
        kept.to_here()
        world.shutdown()
    except RuntimeError as error:
        return str(error)
    finally:
        api._ignore_rref_leak, api._delete_all_user_and_unforked_owner_rrefs = before
    return "left"


@pytest.mark.parametrize(("ignore", "outcome"), [(True, "left"), (False, "Leaking RRef")])
def test_leaks_are_errors_if_a_program_says_so(hosts, tmp_path, ignore, outcome):
    url = f"file://{tmp_path}/meeting"
    for rank, host in enumerate(hosts.take(WORLD - 1), 1):
        host.begin(_leak, rank, url, ignore)

    heard = [_leak(0, url, ignore), *(host.finish() for host in hosts.take(WORLD - 1))]
    assert [text[: len(outcome)] for text in heard] == [outcome] * WORLD


@pytest.fixture(autouse=True)
def nobody_is_left():
    yield
    if api._is_current_rpc_agent_set():
        world.shutdown(graceful=False)
    _last_store.value = None


def _come(rank, url):
    _join(rank, url, None)
    return [info.name for info in world._get_current_rpc_agent().get_worker_infos()]


def test_an_open_world(hosts, tmp_path):
    url = f"file://{tmp_path}/meeting"
    one, two = hosts.take(2)
    assert _come(0, url) == ["worker-0"]
    for host, rank in ((one, 1), (two, 2), (one, 3)):
        if rank == 3:
            one.begin(world.shutdown)
            one.finish()
            with pytest.raises(RuntimeError, match="could not find destination name worker-1"):
                api._to_worker_info("worker-1")
        host.begin(_come, rank, url)
        assert f"worker-{rank}" in host.finish()
        assert world.get_worker_info(f"worker-{rank}").id == rank
    world.shutdown()
    for host in (one, two):
        host.begin(world.shutdown)
        host.finish()


def _take_part(rank, url):
    _join(rank, url, 2)
    world.shutdown()


def test_a_profile_shows_what_a_call_runs_in_another_process(hosts, tmp_path):
    url = f"file://{tmp_path}/meeting"
    (host,) = hosts.take(1)
    host.begin(_take_part, 1, url)
    _join(0, url, 2)
    with profile() as profiled:
        api.rpc_sync("worker-1", torch.neg, (torch.ones(2),))
    world.shutdown()
    host.finish()
    here, there = "rpc_sync#aten::neg(worker-0 -> worker-1)", "aten::neg"

    assert (here, 0) in [(event.name, event.node_id) for event in profiled.function_events]
    (event,) = [event for event in profiled.function_events if event.is_remote]
    assert (event.name, event.node_id) == (f"{here}#remote_op: {there}", 1)


def test_worlds_do_not_mix(hosts, tmp_path):
    url = f"file://{tmp_path}/meeting"
    (host,) = hosts.take(1)
    _join(0, url, 1)
    host.begin(_come, 1, url)

    with pytest.raises(RuntimeError, match="RPC group mixes statically and dynamically"):
        host.finish()
    world.shutdown()


def _same_name(rank, url):
    _join(rank, url, 2, "same")


def test_a_name_is_taken_once(hosts, tmp_path):
    url = f"file://{tmp_path}/meeting"
    (host,) = hosts.take(1)
    host.begin(_same_name, 1, url)
    for joined in (lambda: _same_name(0, url), host.finish):
        with pytest.raises(RuntimeError, match="is not unique"):
            joined()


def test_a_native_worker_is_one_for_compat_too(workers):
    assert world.get_worker_info("w1") == gradwire.get_worker_info("w1")
    assert gradwire.rpc_sync("w1", far.here) == "w1"
