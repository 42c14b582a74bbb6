"""Workers of one machine in a job of many: two addresses in one, and which of them is used."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

import gradwire
from gradwire import Options, Timeouts
from gradwire.errors import PeerLost
from gradwire.rpc.join import join
from gradwire.rpc.listening import listen, transports_for
from gradwire.transport import near
from tests.background import Background
from tests.certificates import job

FAR = "127.0.0.2"
"""A host that is not known to be this machine, and is."""


def options(name="w0"):
    timeouts = Timeouts(join=30, call=30)
    return Options(init_method=f"tcp://{FAR}:1", tls=job().tls(name), timeouts=timeouts)


@pytest.fixture
def transports():
    return transports_for(options(), "w0")


@pytest.fixture
def listener(transports):
    listener = listen(transports, options())
    yield listener
    listener.close()


def remote_of(transports, address):
    channel = transports.connect(address, time.monotonic() + 10)
    channel.close()
    return channel.remote


def test_a_worker_of_a_job_on_many_machines_has_two_addresses(listener):
    here, there = listener.address.split(" ")

    assert here.startswith(f"near://{near.this_machine()}/")
    assert there.startswith("tls://127.0.0.1:")


def test_a_peer_on_this_machine_uses_the_first(transports, listener):
    assert remote_of(transports, listener.address).startswith("unix:///")


def test_a_peer_on_another_machine_uses_the_second(transports, listener):
    there = listener.address.replace(near.this_machine(), "another-machine")

    assert remote_of(transports, there).startswith("tls://127.0.0.1:")


def test_so_does_one_that_cannot_see_the_path(transports, listener):
    """A container, or a worker whose socket was removed."""
    here, there = listener.address.split(" ")

    assert remote_of(transports, f"{here}-gone {there}").startswith("tls://127.0.0.1:")


def test_the_error_is_that_of_the_second(transports, listener):
    there = listener.address.replace(near.this_machine(), "another-machine")
    listener.close()

    with pytest.raises(PeerLost, match=r"tls://127\.0\.0\.1:"):
        transports.connect(there, time.monotonic() + 10)


def test_where_machines_cannot_be_told_apart_there_is_one_address(monkeypatch, listener):
    monkeypatch.setattr(near, "_BOOT_ID", Path("/nowhere"))
    near.this_machine.cache_clear()
    try:
        transports = transports_for(options(), "w0")
        alone = listen(transports, options())
        alone.close()
        assert alone.address.startswith("tls://127.0.0.1:")
        assert remote_of(transports, listener.address).startswith("tls://127.0.0.1:")
    finally:
        near.this_machine.cache_clear()


def test_the_socket_is_removed_at_the_end(transports):
    listener = listen(transports, options())
    here = listener.address.split(" ")[0]
    listener.close()

    with pytest.raises(PeerLost):
        transports.connect(here, time.monotonic() + 10)


def test_workers_of_one_machine_share_memory_and_use_no_certificate(caplog):
    caplog.set_level(logging.INFO)
    store = HashStore()
    joining = [
        Background(lambda name=f"w{n}", n=n: join(name, n, 2, options(name), store=store))
        for n in range(2)
    ]
    workers = [each.result() for each in joining]
    try:
        with workers[0].scope():
            assert gradwire.rpc_sync("w1", torch.neg, args=(torch.ones(1),)) == -1
        remotes = [c.remote for c in workers[0].agent._connections.channels[1]]
        assert all(remote.startswith("unix:///") for remote in remotes), remotes
    finally:
        leaving = [
            Background(lambda worker=worker: worker.shutdown(graceful=True)) for worker in workers
        ]
        for each in leaving:
            each.result()
