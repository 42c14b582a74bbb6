"""What becomes of blocks when the peer's process ends before its device is done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from gradwire.agent.devices import lanes
from gradwire.agent.devices.lanes import IncomingLane, _is_alive, _let_go
from gradwire.agent.messages import OpenBlock
from gradwire.transport.devices.words import PageAddress, Words


class Block:
    def __init__(self, is_behind=True):
        self.behind, self.abandoned = is_behind, False

    def is_behind(self):
        return self.behind

    def abandon(self):
        self.abandoned, self.behind = True, False

    def read(self, nbytes):
        return bytes(nbytes)

    def release(self):
        assert not self.behind


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as made:
        yield made
        made.kill()


def test_streams_that_wait_for_a_dead_process_are_let_go(process):
    process.kill()
    waiting, other = Block(), Block(is_behind=False)

    assert _let_go([waiting, other], process.pid, [], "w0 to w1")
    assert waiting.abandoned
    assert not other.abandoned


def test_the_device_work_of_a_process_that_lives_is_waited_for(process):
    block = Block()
    timer = threading.Timer(0.05, setattr, (block, "behind", False))
    timer.start()

    assert not _let_go([block], process.pid, [], "w0 to w1")
    timer.join()
    assert not block.abandoned


def test_what_a_device_never_lets_go_of_stays_and_is_logged(process, caplog, monkeypatch):
    monkeypatch.setattr(lanes, "_LONGEST_SECONDS", 0.05)
    block = Block()

    assert _let_go([block], process.pid, [], "w0 to w1") is None
    assert not block.abandoned
    assert "w0 to w1: 1 blocks of device memory are still in use" in caplog.text


@pytest.mark.parametrize("has_ended", [False, True])
def test_blocks_that_a_thread_uses_are_not_let_go(process, has_ended):
    """It may wait for a stream that waits for the peer: that is let go first."""
    block, busy = Block(is_behind=has_ended), [None]
    if has_ended:
        process.kill()
    closing = threading.Thread(target=_let_go, args=([block], process.pid, busy, "w0 to w1"))
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    busy.pop()
    closing.join(5)
    assert not closing.is_alive()
    assert block.abandoned == has_ended


def test_the_log_names_the_peer_whose_tensors_never_came(process, caplog):
    page = Words.make()
    driver = SimpleNamespace(
        device_with=lambda _: "a device",
        open=lambda *_: Block(),
    )
    lane = IncomingLane(threading.RLock(), "w0 from w1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Words, "open", lambda _: page)
        address = PageAddress(process.pid, 3, bytes(32))
        lane.open(OpenBlock(7, 5, "cuda", "uuid", 8, b"", address), driver)
    process.kill()

    lane.close()

    assert lane.blocks == {}
    assert "w0 from w1: the peer died before its device was done" in caplog.text


def test_a_process_that_was_not_waited_for_has_ended(process):
    assert _is_alive(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not _is_alive(process.pid)
    process.wait()
    assert not _is_alive(process.pid)


def test_this_process_is_alive_whatever_its_name_is():
    assert _is_alive(os.getpid())
