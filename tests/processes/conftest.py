"""Processes that are started once for this folder, and workers on them for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire import Options, Timeouts
from tests.certificates import job
from tests.process_cluster import Hosts, process_cluster
from tests.processes import far

LINKS = {
    "unix": "unix",
    "tcp4": "tcp://127.0.0.1:0",
    "tcp6": "tcp://[::1]:0",
    "tls": "tls://127.0.0.1:0",
}
TIMEOUTS = Timeouts(join=60, call=60, backward=60, shutdown=60)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def hosts():
    """Two processes. They start together, since each takes seconds to import torch."""
    with pytest.MonkeyPatch.context() as patch, Hosts(0) as hosts:
        patch.setenv("OMP_NUM_THREADS", "1")  # they share a machine that may be small
        for host in hosts.take(2):
            host.begin(far.warm_up)
        for host in hosts.take(2):
            host.finish()
        yield hosts


@pytest.fixture(scope="module", autouse=True)
def hosts_are_back(hosts):
    """Those that the tests of a file have killed run again: what it leaves can be counted."""
    yield
    hosts.start()


@pytest.fixture
def workers(hosts):
    """This process as w0, and w1 and w2 on hosts of their own, over unix sockets."""
    options = Options(listen="unix", timeouts=TIMEOUTS)
    with process_cluster(3, expose=[far], options=options, hosts=hosts) as others:
        yield others
        far.forget()


@pytest.fixture(params=LINKS)
def linked(hosts, request):
    """The same workers, over each kind of link in turn."""
    tls = job().tls("all") if request.param == "tls" else None
    options = Options(listen=LINKS[request.param], timeouts=TIMEOUTS, tls=tls)
    with process_cluster(3, expose=[far], options=options, hosts=hosts) as others:
        yield others
        far.forget()
