"""What is particular to channels in one process."""

from __future__ import annotations

import time

import pytest

from gradwire.errors import DeadlinePassed, PeerLost, UsageError
from gradwire.transport.memory import MemoryNetwork
from gradwire.wire.message import Frame
from tests.transport.conformance import recv

FRAME = Frame(1, 0, 0, b"head", [b"payload"])


def soon() -> float:
    return time.monotonic() + 5


def test_a_listener_without_a_name_gets_a_fresh_one():
    network = MemoryNetwork()
    network.listen("memory://listener-2")
    assert network.listen("memory://").address == "memory://listener-1"
    assert network.listen("memory://").address == "memory://listener-3"


def test_a_name_can_be_taken_once_until_it_is_given_back():
    network = MemoryNetwork()
    listener = network.listen("memory://name")
    with pytest.raises(UsageError, match="cannot listen on memory://name: the name is taken"):
        network.listen("memory://name")
    listener.close()
    network.listen("memory://name")


def test_two_networks_do_not_see_each_other():
    MemoryNetwork().listen("memory://name")
    with pytest.raises(PeerLost, match="cannot reach memory://name: nobody listens there"):
        MemoryNetwork().connect("memory://name", soon())


def test_an_address_of_another_scheme_is_refused():
    with pytest.raises(UsageError, match="tcp://host:1 is not a memory address"):
        MemoryNetwork().connect("tcp://host:1", soon())


def test_both_ends_have_names():
    network = MemoryNetwork()
    listener = network.listen("memory://name")
    here = network.connect("memory://name", soon())
    assert here.remote == "memory://name"
    assert listener.accept().remote == "memory://name (connection 1)"
    assert [end.remote for end in network.pair()] == ["memory://pair-2/b", "memory://pair-2/a"]


def test_a_channel_shows_its_state():
    here, _ = MemoryNetwork().pair()
    assert repr(here) == "<MemoryChannel to memory://pair-1/b: open>"
    here.close("enough")
    assert repr(here) == "<MemoryChannel to memory://pair-1/b: closed here: enough>"


def test_who_was_not_accepted_learns_that_the_listener_closed():
    network = MemoryNetwork()
    listener = network.listen("memory://name")
    here = network.connect("memory://name", soon())
    listener.close()
    with pytest.raises(PeerLost, match="connection closed by peer"):
        recv(here)


def test_a_network_holds_as_much_as_it_is_told():
    here, there = MemoryNetwork(capacity=2 * (24 + 4 + 7)).pair()
    here.send(FRAME, soon())
    here.send(FRAME, soon())
    with pytest.raises(DeadlinePassed, match="memory://pair-1/b did not accept a message before"):
        here.send(FRAME, time.monotonic())
    recv(there)
    here.send(FRAME, soon())


def test_a_frame_larger_than_the_whole_pipe_goes_when_it_is_empty():
    here, there = MemoryNetwork(capacity=10).pair()
    here.send(FRAME, soon())
    assert bytes(recv(there).payload[0]) == b"payload"


def test_frames_that_nobody_will_receive_are_let_go():
    network = MemoryNetwork()
    pool = network._pool
    here, there = network.pair()
    here.send(Frame(1, 0, 0, b"", [bytes(4096)]), soon())
    assert pool.cached == 0
    there.close()
    assert pool.cached == 4096
