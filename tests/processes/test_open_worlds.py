"""Open worlds over processes: who comes, who goes, who is killed."""

from __future__ import annotations

import os
import socket

import pytest
import torch

import gradwire
from gradwire import Options, PeerLost, StaleIncarnation, UnknownWorker, UsageError
from gradwire.rpc.join import _last_store
from tests.processes import far
from tests.processes.conftest import TIMEOUTS


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _come(name, rank, options, environment=()):
    """In a process of its own: join, and serve until it is told to leave."""
    os.environ.update(environment)
    gradwire.init_rpc(name, rank, options=options, expose=[far])
    return [info.name for info in gradwire.rpc.api._here().directory.all()]


def _go(environment=()):
    gradwire.shutdown()
    for variable in dict(environment):
        del os.environ[variable]


def _names():
    return [info.name for info in gradwire.rpc.api._here().directory.all()]


@pytest.fixture(params=["env", "tcp", "file"])
def place(request, tmp_path, monkeypatch):
    port = _free_port()
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    url = {
        "env": "env://",
        "tcp": f"tcp://127.0.0.1:{port}",
        "file": f"file://{tmp_path}/meeting",
    }[request.param]
    given = environment if request.param == "env" else {}
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    return Options(init_method=url, timeouts=TIMEOUTS), given


@pytest.fixture
def here():
    yield
    if gradwire.current.current_worker.maybe_default() is not None:
        gradwire.shutdown()
    _last_store.value = None


def test_processes_come_and_go(hosts, place, here):
    options, environment = place
    one, two = hosts.take(2)
    gradwire.init_rpc("first", 0, options=options, expose=[far])

    for n in range(2):
        one.begin(_come, "one-1", 1, options, environment)
        assert one.finish() == ["first", "one-1"]
        two.begin(_come, f"two:{n}", 2, options, environment)
        assert two.finish() == ["first", "one-1", f"two:{n}"]

        assert gradwire.rpc_sync("one-1", far.here) == "one-1"
        assert gradwire.rpc_sync(2, far.here) == f"two:{n}"

        one.begin(_go, environment)
        one.finish()
        assert _names() == ["first", f"two:{n}"]
        with pytest.raises(UnknownWorker, match="could not find destination name one-1"):
            gradwire.rpc_sync("one-1", far.here)
        two.begin(_go, environment)
        two.finish()
        assert _names() == ["first"]


def test_a_killed_member_is_lost_and_its_place_is_free(hosts, tmp_path, here):
    options = Options(init_method=f"file://{tmp_path}/meeting", timeouts=TIMEOUTS)
    (host,) = hosts.take(1)
    gradwire.init_rpc("first", 0, options=options, expose=[far])
    host.begin(_come, "second", 1, options)
    host.finish()
    assert gradwire.rpc_sync("second", far.here) == "second"

    host.kill()
    with pytest.raises(PeerLost, match="second was lost"):
        gradwire.rpc_sync("second", far.here)
    (host,) = hosts.take(1)
    host.begin(_come, "second", 1, options)
    assert host.finish() == ["first", "second"]
    assert gradwire.rpc_sync("second", far.here) == "second"
    host.begin(_go)
    host.finish()


def test_a_process_is_many_workers_one_after_the_other(tmp_path):
    for n in range(12):
        open_world = n % 2 == 0
        options = Options(init_method=f"file://{tmp_path}/{n}", timeouts=TIMEOUTS)
        rank = n if open_world else 0
        gradwire.init_rpc(f"w-{n}", rank, None if open_world else 1, options, expose=[far])
        assert gradwire.rpc_sync(rank, far.here) == f"w-{n}"
        assert gradwire.get_worker_info().id == rank
        gradwire.shutdown()


def test_a_variable_that_a_launcher_set_makes_a_world_closed_unless_told(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    options = Options(init_method=f"file://{tmp_path}/closed", timeouts=TIMEOUTS)
    gradwire.init_rpc("a", options=options)
    assert not gradwire.rpc.api._here().directory.is_open
    gradwire.shutdown()

    options = Options(init_method=f"file://{tmp_path}/open", timeouts=TIMEOUTS, is_open=True)
    gradwire.init_rpc("a", options=options)
    assert gradwire.rpc.api._here().directory.is_open
    gradwire.shutdown()
    with pytest.raises(UsageError, match="an open world has no world_size, but a was given 1"):
        gradwire.init_rpc("a", 0, 1, options)


def test_a_worker_without_a_rank_is_told_so(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    with pytest.raises(UsageError, match=r"init_rpc\('a'\) does not know its rank"):
        gradwire.init_rpc("a")


def _between_others(x):
    """A gradient from here through another worker."""
    with gradwire.context():
        gradwire.rpc_sync("second", far.cubed, args=(x,)).backward()
    return x.grad


def test_the_first_worker_and_its_store_may_be_lost_after_joining(hosts, here):
    options = Options(init_method=f"tcp://127.0.0.1:{_free_port()}", timeouts=TIMEOUTS)
    first, second = hosts.take(2)
    first.begin(_come, "first", 0, options)  # it hosts the store
    first.finish()
    second.begin(_come, "second", 1, options)
    second.finish()
    gradwire.init_rpc("third", 2, options=options, expose=[far])
    x = torch.tensor(3.0, requires_grad=True)

    with gradwire.context():
        y = gradwire.rpc_sync("second", far.cubed, args=(x,))
        first.kill()
        y.backward()

    assert x.grad == 27
    with pytest.raises(PeerLost, match="first was lost"):
        gradwire.rpc_sync("first", far.here)
    assert gradwire.rpc_sync("second", far.here) == "second"
    assert _between_others(torch.tensor(3.0, requires_grad=True)) == 27
    second.begin(_go)
    second.finish()
    assert "second" not in _names()
    gradwire.shutdown()


def test_the_first_worker_may_be_killed_and_others_come_and_it_comes_back(hosts, tmp_path, here):
    options = Options(init_method=f"file://{tmp_path}/meeting", timeouts=TIMEOUTS)
    first, other = hosts.take(2)
    first.begin(_come, "first", 0, options)
    first.finish()
    gradwire.init_rpc("second", 1, options=options, expose=[far])
    value = gradwire.remote("first", far.same, args=(1,))
    assert value.to_here() == (1,)
    first.kill()

    other.begin(_come, "third", 2, options)
    assert other.finish() == ["second", "third"]
    first, _ = hosts.take(2)
    first.begin(_come, "first", 0, options)
    assert first.finish() == ["first", "second", "third"]

    names, doubled = gradwire.rpc_sync("third", far.through, args=(["first"], 2.0))
    assert (names, doubled) == (["third", "first"], 8.0)
    text = "belongs to incarnation 1 of first, which was restarted as incarnation 4"
    with pytest.raises(StaleIncarnation, match=text):
        value.to_here()
    for host in (first, other):
        host.begin(_go)
        host.finish()
