"""How processes become workers of one job: the meeting places, and what is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

import gradwire
from gradwire import JoinTimeout, Options, Timeouts, UsageError
from gradwire.agent.peers.secret import write_secret
from gradwire.rpc.join import _last_store
from tests.background import Background
from tests.processes import far
from tests.processes.conftest import TIMEOUTS

WORLD = 2
SOON = Timeouts(join=0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _greet(environment, name, rank, options):
    """In a process of its own: join, ask everyone who they are, leave."""
    os.environ.update(environment)
    place = () if environment else (rank, WORLD)
    gradwire.init_rpc(name, *place, options=options, expose=[far])
    try:
        return [gradwire.rpc_sync(n, far.here) for n in range(WORLD)]
    finally:
        gradwire.shutdown()
        for variable in environment:
            del os.environ[variable]


def _environment(rank):
    return {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("listen", ["auto", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize("meeting", ["env", "tcp", "file"])
def test_workers_meet(hosts, tmp_path, meeting, listen):
    port = _free_port()
    url = {
        "env": "env://",
        "tcp": f"tcp://127.0.0.1:{port}",
        "file": f"file://{tmp_path}/meeting",
    }[meeting]
    options = Options(init_method=url, listen=listen, timeouts=TIMEOUTS)

    for rank, host in enumerate(hosts.take(WORLD)):
        environment = _environment(rank) | {"MASTER_PORT": str(port)} if meeting == "env" else {}
        host.begin(_greet, environment, f"n{rank}", rank, options)

    assert [host.finish() for host in hosts.take(WORLD)] == [["n0", "n1"]] * WORLD


def test_a_process_joins_again_under_another_number(hosts, tmp_path):
    (host,) = hosts.take(1)
    options = Options(init_method=f"file://{tmp_path}/meeting", timeouts=TIMEOUTS)

    for n in range(4):
        mine = n % WORLD
        again = replace(options, init_method=f"{options.init_method}{n}")
        host.begin(_greet, {}, f"host{n}", 1 - mine, again)
        heard = _greet({}, f"test{n}", mine, again)
        assert heard == host.finish()
        assert heard[mine] == f"test{n}"


@pytest.mark.parametrize("meeting", ["tcp", "file"])
def test_workers_meet_again_at_the_same_place(hosts, tmp_path, meeting):
    (host,) = hosts.take(1)
    places = {"tcp": f"tcp://127.0.0.1:{_free_port()}", "file": f"file://{tmp_path}/meeting"}
    options = Options(init_method=places[meeting], timeouts=TIMEOUTS)

    for _ in range(6):
        host.begin(_greet, {}, "b", 1, options)
        assert _greet({}, "a", 0, options) == host.finish() == ["a", "b"]
    _last_store.value = None


def _greet_all(name, rank, options):
    """In a process of its own: join a world of three, ask everyone who they are, leave."""
    gradwire.init_rpc(name, rank, 3, options, expose=[far])
    try:
        return [gradwire.rpc_sync(n, far.here) for n in range(3)]
    finally:
        gradwire.shutdown()


def test_ranks_that_rotate_over_one_port_meet(hosts):
    first, second = hosts.take(2)
    options = Options(init_method=f"tcp://127.0.0.1:{_free_port()}", timeouts=TIMEOUTS)
    ranks = [{first: 0, second: 1}, {first: 1, second: 0}] * 2

    for rank in ranks:  # the host of the store before comes last
        here = Background(lambda: _greet_all("test", 2, options))
        if rank is not ranks[0]:
            assert here.is_blocked()  # at the store of the world before
        for host in sorted(rank, key=rank.get):
            host.begin(_greet_all, f"rank{rank[host]}", rank[host], options)
        assert here.result() == first.finish() == second.finish() == ["rank0", "rank1", "test"]
    _last_store.value = None


def test_two_workers_of_one_name_are_refused_by_both(hosts, tmp_path):
    (host,) = hosts.take(1)
    options = Options(init_method=f"file://{tmp_path}/meeting", timeouts=TIMEOUTS)

    host.begin(_greet, {}, "same", 1, options)
    with pytest.raises(UsageError, match="RPC worker name same is not unique"):
        _greet({}, "same", 0, options)
    with pytest.raises(UsageError, match="Workers 0 and 1 share the same name"):
        host.finish()


@pytest.mark.parametrize(("rank", "missing"), [(0, "1, 2"), (1, "0")])
def test_who_does_not_come_is_named(tmp_path, rank, missing):
    options = Options(init_method=f"file://{tmp_path}/meeting", timeouts=SOON)

    with pytest.raises(JoinTimeout, match=f"early timed out waiting for rank {missing} to join"):
        gradwire.init_rpc("early", rank, 3, options)
    with pytest.raises(UsageError, match="RPC has not been initialized"):
        gradwire.shutdown()


def test_a_host_that_is_not_there_is_named():
    options = Options(init_method=f"tcp://127.0.0.1:{_free_port()}", timeouts=SOON)

    with pytest.raises(JoinTimeout, match=r"no rendezvous at tcp://127\.0\.0\.1:"):
        gradwire.init_rpc("late", 1, 2, options)


def test_a_second_init_is_refused_and_the_first_goes_on(workers):
    with pytest.raises(UsageError, match="RPC is already initialized"):
        gradwire.init_rpc("again", 0, 1)
    assert gradwire.rpc_sync("w1", far.here) == "w1"


_JOINER = """
import sys, threading
import gradwire
from gradwire import Options, Timeouts

def tell():
    main, pause = threading.main_thread().ident, threading.Event()
    while True:
        names, frame = set(), sys._current_frames()[main]
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        if names & {"open_store", "meet", "before"}:
            print("joining", flush=True)
            return
        pause.wait(0.01)

threading.Thread(target=tell, daemon=True).start()
rank, size = int(sys.argv[2]), int(sys.argv[3]) or None
options = Options(init_method=sys.argv[1], timeouts=Timeouts(join=100), is_open=size is None)
gradwire.init_rpc(f"w{rank}", rank, size, options)
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("meeting", ["tcp", "file"])
def test_an_interrupt_ends_joining_at_once(tmp_path, meeting, rank):
    places = {"tcp": f"tcp://127.0.0.1:{_free_port()}", "file": f"file://{tmp_path}/meeting"}
    secret = tmp_path / "secret"
    write_secret(secret)
    joiner = subprocess.Popen(
        [sys.executable, "-c", _JOINER, places[meeting], str(rank), "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GRADWIRE_SECRET_FILE": str(secret), "OMP_NUM_THREADS": "1"},
    )
    with joiner:
        try:
            assert joiner.stdout.readline() == "joining\n", joiner.stderr.read()
            joiner.send_signal(signal.SIGINT)
            _, errors = joiner.communicate(timeout=30)  # joining itself has 100 s
        finally:
            joiner.kill()
    assert "KeyboardInterrupt" in errors
    assert joiner.returncode == -signal.SIGINT
