"""What becomes of blocks when the peer's process ends before its device is done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from gradwire.agent.devices.lanes import _is_alive, _let_go


class Block:
    def __init__(self, is_behind=True):
        self.behind, self.abandoned = is_behind, False

    def is_behind(self):
        return self.behind

    def abandon(self):
        self.abandoned, self.behind = True, False


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as made:
        yield made
        made.kill()


def test_streams_that_wait_for_a_dead_process_are_let_go(process, caplog):
    process.kill()
    waiting, other = Block(), Block(is_behind=False)

    _let_go([waiting, other], process.pid, "w0 from w1")

    assert waiting.abandoned
    assert not other.abandoned
    assert "w0 from w1: the peer died before its device was done" in caplog.text


def test_the_device_work_of_a_process_that_lives_is_waited_for(process, caplog):
    block = Block()
    timer = threading.Timer(0.05, setattr, (block, "behind", False))
    timer.start()

    _let_go([block], process.pid, "w0 from w1")
    timer.join()

    assert not block.abandoned
    assert not caplog.text


def test_a_process_that_was_not_waited_for_has_ended(process):
    assert _is_alive(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not _is_alive(process.pid)
    process.wait()
    assert not _is_alive(process.pid)


def test_this_process_is_alive_whatever_its_name_is():
    assert _is_alive(os.getpid())
