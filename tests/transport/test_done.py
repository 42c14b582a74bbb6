"""A wait for the next frame that another thread makes needless."""

import socket
import threading
import time

import pytest

from gradwire.options import Limits
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.memory import MemoryNetwork
from gradwire.transport.sockets.channel import SocketChannel


def sockets():
    pair = socket.socketpair()
    return [
        SocketChannel(end, "unix:///peer", limits=Limits(), stall=5.0, pool=BlockPool())
        for end in pair
    ]


@pytest.fixture(params=[sockets, lambda: MemoryNetwork().pair()], ids=["socket", "memory"])
def channels(request):
    pair = request.param()
    yield pair
    for channel in pair:
        channel.close()


def test_it_ends_when_another_thread_says_so(channels):
    here, _ = channels
    until = time.monotonic() + 60
    asked, done = threading.Event(), threading.Event()

    def is_done():
        asked.set()
        return done.is_set()

    def other():
        asked.wait(10)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert here.maybe_recv(until, is_done) is None
    thread.join()
    assert time.monotonic() < until, "it was the other thread that ended the wait"
