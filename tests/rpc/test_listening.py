"""Where a worker listens, and what it can reach, with a certificate and without."""

from __future__ import annotations

import time

import pytest

from gradwire.errors import UsageError
from gradwire.options import Options, Tls, tls_from_environment
from gradwire.rpc.join import listen, transports_for
from tests.certificates import job

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
