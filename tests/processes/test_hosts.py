"""The processes that the tests of this folder stand on."""

from __future__ import annotations

import os
import warnings

import pytest

import gradwire
from gradwire import DeadlinePassed, Options, PeerLost, UsageError
from tests.process_cluster import process_cluster
from tests.processes import far
from tests.processes.conftest import TIMEOUTS


def test_a_host_runs_functions_in_its_own_process(hosts):
    (host,) = hosts.take(1)

    assert host.do(os.getpid) == host.pid
    assert host.do(far.add, 1, b=2) == 3


def test_what_a_task_raises_is_raised_here(hosts):
    (host,) = hosts.take(1)

    with pytest.raises(far.Refused, match="Refused on w1: not today"):
        host.do(far.refuse, "not today")
    with pytest.raises(UsageError, match="the result of a task of w1 cannot be pickled"):
        host.do(far.unpicklable)


def test_a_host_that_died_is_started_again(hosts):
    (host,) = hosts.take(1)
    before = host.pid

    with pytest.raises(PeerLost, match="the process of w1 died"):
        host.do(far.crash, 3)

    assert host.do(os.getpid) == host.pid != before


def test_a_host_that_takes_too_long_is_stopped(hosts):
    (host,) = hosts.take(1)
    host.begin(far.block)

    with pytest.raises(DeadlinePassed, match=r"w1 did not finish its task in 0\.1 s"):
        host.finish(0.1)

    assert not host.is_running


def test_what_workers_warn_of_is_warned_of_here(hosts):
    cluster = process_cluster(2, expose=[far], options=Options(timeouts=TIMEOUTS), hosts=hosts)
    with warnings.catch_warnings(record=True) as warned, cluster:
        warnings.simplefilter("always")
        gradwire.rpc_sync("w1", far.warn, args=("careful",))

    assert [str(warning.message) for warning in warned] == ["w1: careful"]


def test_a_cluster_brings_hosts_of_its_own_if_given_none():
    with process_cluster(2, expose=[far], options=Options(timeouts=TIMEOUTS)) as others:
        pid = gradwire.rpc_sync("w1", far.pid)
        assert pid == others["w1"].pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_block_that_fails_frees_the_hosts(hosts):
    cluster = process_cluster(3, expose=[far], options=Options(timeouts=TIMEOUTS), hosts=hosts)
    before = [host.do(os.getpid) for host in hosts.take(2)]

    with pytest.raises(far.Refused, match="Refused on w2: enough"), cluster:
        gradwire.rpc_sync("w2", far.refuse, args=("enough",))

    assert [host.do(os.getpid) for host in hosts.take(2)] == before
