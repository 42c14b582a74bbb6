"""The page that says which blocks are in use, and what a peer may make us open."""

from __future__ import annotations

import gc
import os

import pytest

from gradwire.errors import BadMessage
from gradwire.transport.devices.words import IN_USE, TAKEN, UNREAD, PageAddress, Words


def test_both_ends_see_the_same_words():
    ours = Words.make()
    theirs = Words.open(ours.address)
    ours[3] = IN_USE
    assert theirs[3] == IN_USE
    assert theirs[2] == TAKEN
    theirs[3] = UNREAD
    assert ours[3] == UNREAD
    ours.close()


def test_a_page_needs_the_right_key():
    ours = Words.make()
    address = ours.address
    with pytest.raises(BadMessage, match="another key"):
        Words.open(PageAddress(address.process, address.descriptor, bytes(32)))
    with pytest.raises(BadMessage, match="another key"):
        Words.open(PageAddress(address.process, address.descriptor, b""))
    ours.close()


def test_other_files_are_not_opened(tmp_path):
    descriptor = os.open(tmp_path / "precious", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(BadMessage, match="no file of gradwire"):
            Words.open(PageAddress(os.getpid(), descriptor, bytes(32)))
    finally:
        os.close(descriptor)


def test_other_memory_of_gradwire_is_not_opened():
    descriptor = os.memfd_create("gradwire-words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    try:
        with pytest.raises(BadMessage, match="not sealed"):
            Words.open(PageAddress(os.getpid(), descriptor, bytes(32)))
    finally:
        os.close(descriptor)


def test_a_process_that_is_gone_is_an_ordinary_failure():
    with pytest.raises(OSError, match="No such"):
        Words.open(PageAddress(2**22 + 1, 3, bytes(32)))


def test_nothing_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    ours = Words.make()
    theirs = Words.open(ours.address)
    ours.close()
    del ours, theirs
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
