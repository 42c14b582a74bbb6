"""Where a worker listens, and what it can reach, with a certificate and without."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

import gradwire
from gradwire.errors import NotTrusted, UsageError
from gradwire.options import Options, Timeouts, Tls, tls_from_environment
from gradwire.rpc.join import join
from gradwire.rpc.listening import listen, reachable_address, transports_for
from gradwire.transport.tls import ONE_AUTHORITY
from tests.certificates import job, other_job
from tests.leftovers import eventually

VARIABLES = ("GRADWIRE_TLS_CERT", "GRADWIRE_TLS_KEY", "GRADWIRE_TLS_CA")


@pytest.fixture(autouse=True)
def _no_certificates(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def address_of(options: Options) -> str:
    listener = listen(transports_for(options, "w0"), options)
    listener.close()
    return listener.address


@pytest.mark.parametrize("asked", ["tcp://127.0.0.1:0", "tls://127.0.0.1:0", "tcp://"])
def test_with_a_certificate_tcp_becomes_tls(asked):
    options = Options(listen=asked, tls=job().tls("w0"))
    assert address_of(options).startswith("tls://127.0.0.1:")


def test_with_a_certificate_any_address_may_be_listened_on():
    options = Options(listen="tcp://0.0.0.0:0", tls=job().tls("w0"))
    assert address_of(options).startswith("tls://0.0.0.0:")


@pytest.mark.parametrize(
    ("bound", "host", "told"),
    [
        ("tls://0.0.0.0:80", "127.0.0.1", "tls://127.0.0.1:80"),
        ("tcp://0.0.0.0:80", "localhost", "tcp://127.0.0.1:80"),
        ("tls://[::]:80", "[::1]", "tls://[::1]:80"),
        ("tls://[::]:80", "127.0.0.1", "tls://127.0.0.1:80"),
        ("tls://10.0.0.1:80", "127.0.0.1", "tls://10.0.0.1:80"),
        ("tls://node-3:80", "127.0.0.1", "tls://node-3:80"),
        ("unix:///0.0.0.0", "127.0.0.1", "unix:///0.0.0.0"),
    ],
)
def test_peers_are_told_the_address_towards_the_rendezvous_and_no_wildcard(bound, host, told):
    assert reachable_address(bound, Options(init_method=f"tcp://{host}:1")) == told


def test_without_a_rendezvous_host_a_wildcard_is_refused_with_the_way_out(tmp_path):
    options = Options(init_method=f"file://{tmp_path}/meeting")
    with pytest.raises(UsageError, match=r"cannot connect to tls://0\.0\.0\.0:80") as refusal:
        reachable_address("tls://0.0.0.0:80", options)
    assert refusal.value.hint == 'name it: Options(listen="tcp://ADDRESS:80")'


def test_workers_that_listen_on_all_addresses_reach_each_other(monkeypatch):
    def joining(rank):
        options = Options(
            init_method="tcp://127.0.0.1:1",  # not used: the store is given
            listen="tcp://0.0.0.0:0",
            tls=job().tls(f"w{rank}"),
            timeouts=Timeouts(join=30, call=30),
        )
        return join(f"w{rank}", rank, None, options, store=store)

    store = HashStore()
    workers = [joining(0), joining(1)]
    try:
        with workers[0].scope():
            x = gradwire.rpc_sync("w1", torch.sin, args=(torch.zeros(2),))
        assert x.tolist() == [0.0, 0.0]
        assert workers[0].directory.address(1).startswith("tls://127.0.0.1:")
    finally:
        for worker in workers:
            worker.close()


def test_of_two_workers_with_different_authorities_both_log_who_refused_whom_and_why(caplog):
    def joining(rank, tls):
        options = Options(listen="tcp://", tls=tls, timeouts=Timeouts(join=30, connect=30, call=30))
        entered.append(join(f"w{rank}", rank, 2, options, store=store))

    store, entered = HashStore(), []
    theirs = threading.Thread(target=joining, args=(1, other_job().tls("w1")))
    theirs.start()
    joining(0, job().tls("w0"))
    theirs.join(30)
    workers = sorted(entered, key=lambda worker: worker.name)
    place = workers[0].directory.address(1)
    try:
        with caplog.at_level(logging.WARNING, "gradwire"), workers[0].scope():
            for _ in range(2):
                with pytest.raises(NotTrusted, match="its certificate is refused"):
                    gradwire.rpc_sync("w1", torch.sin, args=(torch.zeros(2),))
            assert eventually(lambda: workers[1].refusals.seen() == {"alert unknown ca": 2})
        assert workers[0].refusals.seen() == {"listener not trusted": 2}
    finally:
        for worker in workers:
            worker.close()
    by_w0, by_w1 = sorted(caplog.messages, reverse=True)
    assert by_w0.startswith(f"w0 made no connection to {place}: {place} is not trusted: its cert")
    assert by_w0.endswith(f"hint: {ONE_AUTHORITY}")
    assert by_w1 == f"tls://127.0.0.1 refused w1: alert unknown ca; {ONE_AUTHORITY}"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("tcp://::1:29400", r"an IPv6 address needs brackets\nhint: tcp://\[ADDRESS\]:PORT"),
        ("tcp://2001:db8::1", r"an IPv6 address needs brackets\nhint: tcp://\[ADDRESS\]:PORT"),
        ("tcp://host:port", r"Port could not be cast.*\nhint: tcp://HOST:PORT"),
    ],
)
@pytest.mark.parametrize("listen", ["auto", "unix"])
def test_a_rendezvous_that_is_written_wrongly_is_refused_with_the_way_out(
    rank, method, says, listen
):
    options = Options(init_method=method, listen=listen, timeouts=Timeouts(join=1))
    with pytest.raises(UsageError, match=f"^no rendezvous at {method}: {says}"):
        join("w", rank, 2, options)


def test_workers_of_one_machine_meet_at_a_unix_socket_all_the_same():
    assert address_of(Options(listen="unix", tls=job().tls("w0"))).startswith("unix:///")


def test_the_files_may_be_named_by_the_environment(monkeypatch):
    tls = job().tls("w0")
    for variable, path in zip(VARIABLES, (tls.certificate, tls.key, tls.authority), strict=True):
        monkeypatch.setenv(variable, path)
    assert tls_from_environment() == tls
    assert address_of(Options(listen="tcp://")).startswith("tls://127.0.0.1:")


def test_the_environment_names_all_the_files_or_none(monkeypatch):
    assert tls_from_environment() is None
    monkeypatch.setenv("GRADWIRE_TLS_KEY", "/key")
    with pytest.raises(UsageError, match="GRADWIRE_TLS_CERT, GRADWIRE_TLS_CA is not set\nhint: "):
        tls_from_environment()


def test_a_worker_with_a_certificate_never_dials_without():
    transports = transports_for(Options(tls=job().tls("w0")), "w0")
    with pytest.raises(UsageError, match=r"'tcp'.*\nhint: this worker has a certificate and uses"):
        transports.connect("tcp://127.0.0.1:1", time.monotonic() + 1, "w1")


def test_a_worker_without_a_certificate_is_told_that_it_needs_one():
    transports = transports_for(Options(), "w0")
    with pytest.raises(UsageError, match=r"'tls'.*\nhint: this worker has no certificate: start"):
        transports.connect("tls://127.0.0.1:1", time.monotonic() + 1, "w1")


def test_a_certificate_for_another_worker_is_refused_before_anything_is_said():
    with pytest.raises(UsageError, match=r"^w0 has a certificate for w1\nhint: `gradwire certs"):
        transports_for(Options(tls=job().tls("w1")), "w0")


@pytest.mark.parametrize("path", ["", None, 7])
def test_a_path_is_a_path(path):
    with pytest.raises(UsageError, match=r"Tls\(key=.*\) is not the path of a file"):
        Tls(certificate="a", key=path, authority="b")
