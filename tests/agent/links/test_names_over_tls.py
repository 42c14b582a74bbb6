"""The handshake over TLS: a secret alone does not give a name, and nobody can stand in between."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from gradwire.agent.links.handshake import examine, prove
from gradwire.agent.links.handshake_state import Reason, Refusal
from gradwire.agent.peers.secret import fresh_secret
from gradwire.errors import GradwireError, PeerLost
from gradwire.transport.tls import TlsTransport
from tests.certificates import job

SECRET, JOB = fresh_secret(), "job"


def soon() -> float:
    return time.monotonic() + 10


class Answering:
    """A worker that examines the one who dials it, on a thread of its own."""

    def __init__(self, worker: str) -> None:
        self.listener = TlsTransport(job().tls(worker)).listen("tls://")
        self.outcome: list[object] = []
        self._thread = threading.Thread(target=self._examine, args=(worker,), daemon=True)
        self._thread.start()

    def _examine(self, worker: str) -> None:
        channel = self.listener.accept()
        try:
            self.outcome.append(examine(channel, SECRET, JOB, worker, soon()))
        except GradwireError as error:
            self.outcome.append(error)
        channel.close()

    def close(self) -> object:
        self._thread.join(20)
        self.listener.close()
        return self.outcome[0]


def dial(worker: str, address: str, name: str | None = None):
    return TlsTransport(job().tls(worker)).connect(address, soon(), name)


def test_a_worker_is_known_by_its_certificate_and_its_secret():
    answering = Answering("w1")
    channel = dial("w0", answering.listener.address, "w1")
    prove(channel, SECRET, JOB, "w0", "w1", soon())
    assert answering.close() == "w0"
    channel.close()


def test_a_member_cannot_claim_the_name_of_another():
    answering = Answering("w1")
    channel = dial("w2", answering.listener.address, "w1")
    with pytest.raises(GradwireError):
        prove(channel, SECRET, JOB, "w0", "w1", soon())
    refusal = answering.close()
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.CERTIFICATE
    channel.close()


def test_a_member_between_two_others_cannot_pass_on_what_they_prove():
    """It has a certificate for every name, but not their keys: the two ends see other bindings."""
    answering = Answering("w1")
    between = TlsTransport(job().tls("all")).listen("tls://")
    near = dial("w0", between.address, "w1")
    inside = between.accept()
    outside = dial("all", answering.listener.address, "w1")

    def pass_on(source, target) -> None:
        with suppress(GradwireError):
            while True:
                target.send_raw(source.recv_raw(1, soon()), soon())

    relays = [
        threading.Thread(target=pass_on, args=ends, daemon=True)
        for ends in ((inside, outside), (outside, inside))
    ]
    for relay in relays:
        relay.start()
    with pytest.raises((Refusal, PeerLost)):
        prove(near, SECRET, JOB, "w0", "w1", soon())
    refusal = answering.close()
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.SECRET
    for channel in (near, inside, outside, between):
        channel.close()
    for relay in relays:
        relay.join(10)
