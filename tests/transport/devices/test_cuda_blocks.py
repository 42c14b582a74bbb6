"""The marks of CUDA blocks, over a runtime that only writes down what it is asked to do."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from gradwire.errors import BadMessage
from gradwire.transport.devices import cuda
from gradwire.transport.devices.contract import DeviceError
from gradwire.transport.devices.words import FREE, READY, USE, Words

OK = (0,)


class Fake:
    """The modules of cuda.bindings. Streams are numbers; a write is done when `run` says so."""

    def __init__(self):
        self.calls, self.writes, self.status = [], [], 0
        self.cudaStreamNonBlocking = self.cudaHostRegisterPortable = 1
        self.cudaHostRegisterMapped, self.cudaIpcMemLazyEnablePeerAccess = 2, 1
        self.cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            return OK

        return call

    def cudaStreamCreateWithFlags(self, _):
        return 0, 77

    def cudaHostGetDevicePointer(self, place, _):
        return 0, place

    def cuStreamWriteValue32(self, stream, place, number, _):
        self.writes.append((stream, place, number))
        said, self.status = self.status, 0
        return (said,)

    def waits(self):
        return [call[3] for call in self.calls if call[0] == "cuStreamWaitValue32"]


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(cuda, "_by_uuid", lambda: {"one": torch.device("cuda", 0)})
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return Fake()


def block(fake, marks, *, is_own=True):
    made = cuda._Cuda(fake, fake)
    return cuda.CudaBlock(made, torch.device("cuda", 0), 1024, 4096, marks, is_own=is_own)


S = SimpleNamespace(cuda_stream=5)


def run(fake, words):
    """Let the device write its marks."""
    for _, place, number in fake.writes:
        at = place - words.place
        words._page[at : at + 4] = number.to_bytes(4, "little")
    fake.writes.clear()


@pytest.fixture
def words():
    made = Words.make()
    yield made
    made.close()
    del made
    gc.collect()  # the tracebacks of expected errors


def use(owner, peer):
    owner.begin(S, was_taken=True)
    owner.filled(S)
    peer.begin_taking(S)
    peer.taken(S)


def test_what_is_written_is_on_the_device_when_write_returns(fake, words):
    """A copy from pageable memory may return before; one back to the host ends after it."""
    block(fake, words.marks(0)).write(b"proof")

    _, (_, to, _, length, _), (_, _, back_from, back_length, _) = [
        None,
        *(call for call in fake.calls if call[0] == "cudaMemcpy"),
    ]
    assert (to, length) == (back_from, back_length) == (4096, 5)


def test_streams_wait_only_for_marks_that_have_not_come(fake, words):
    owner, peer = block(fake, words.marks(3)), block(fake, words.marks(3), is_own=False)
    run(fake, words)

    owner.begin(S, was_taken=True)
    owner.filled(S)
    run(fake, words)
    peer.begin_taking(S)
    peer.taken(S)
    run(fake, words)
    owner.begin(S, was_taken=True)
    assert fake.waits() == []

    owner.filled(S)
    peer.begin_taking(S)
    assert fake.waits() == [2]
    peer.taken(S)
    owner.begin(S, was_taken=True)
    assert fake.waits() == [2, 2]


def test_a_use_that_was_not_read_waits_for_its_own_work_and_for_the_one_before(fake, words):
    marks = words.marks(0)
    owner, peer = block(fake, marks), block(fake, marks, is_own=False)
    run(fake, words)
    use(owner, peer)
    owner.begin(S, was_taken=True)  # waits for free 1
    owner.begin(S, was_taken=False)  # that did not leave, and was not filled

    assert fake.waits() == [1, 1, 1, 1]  # ready 1 by the peer, free 1, ready 1, free 1
    assert marks[USE] == 3


def test_marks_count_on_after_the_last_number(fake, words):
    marks = words.marks(127)
    marks[USE] = marks[READY] = marks[FREE] = 2**32 - 1
    owner, peer = block(fake, marks), block(fake, marks, is_own=False)
    fake.writes.clear()
    use(owner, peer)
    run(fake, words)

    assert (marks[USE], marks[READY], marks[FREE]) == (0, 0, 0)
    assert marks.has_come(READY, 2**32 - 1)
    assert not marks.has_come(READY, 1)


def test_an_owner_that_died_leaves_ones_and_lets_streams_go(fake, words):
    owner, peer = block(fake, words.marks(1)), block(fake, words.marks(1), is_own=False)
    run(fake, words)
    owner.begin(S, was_taken=True)
    owner.filled(S)
    assert not peer.is_behind()
    peer.begin_taking(S)
    assert peer.is_behind()

    peer.abandon()

    assert not peer.is_behind()
    memset = ("cudaMemsetAsync", 4096, 0xFF, 1024, 77)
    assert fake.calls[-3:] == [memset, ("cudaStreamSynchronize", 77), ("cudaStreamDestroy", 77)]


def test_a_peer_that_died_lets_the_streams_of_the_owner_go(fake, words):
    owner, peer = block(fake, words.marks(1)), block(fake, words.marks(1), is_own=False)
    run(fake, words)
    use(owner, peer)
    assert not owner.is_behind()
    owner.begin(S, was_taken=True)
    assert owner.is_behind()

    owner.abandon()

    assert not owner.is_behind()
    assert not any(call[0] == "cudaMemsetAsync" for call in fake.calls)


def test_a_device_that_cannot_write_marks_has_no_blocks(fake, words):
    fake.status = 801
    with pytest.raises(DeviceError, match="CUDA says 801"):
        block(fake, words.marks(0))


def test_a_thread_that_has_not_used_the_device_asks_again(fake, words):
    owner = block(fake, words.marks(0))
    fake.status, fake.writes = cuda._NO_CONTEXT, []
    owner.filled(S)
    assert len(fake.writes) == 2
    assert fake.calls[-1] == ("cudaSetDevice", 0)


def test_with_several_devices_that_of_the_block_is_made_current(fake, words, monkeypatch):
    entered = []
    monkeypatch.setattr(cuda, "_by_uuid", lambda: {"one": 1, "two": 2})
    monkeypatch.setattr(torch.cuda, "device", lambda d: entered.append(d) or nullcontext())
    owner = block(fake, words.marks(0))
    entered.clear()
    owner.begin(S, was_taken=True)
    owner.fill(0, SimpleNamespace(data_ptr=int, nbytes=4, record_stream=id), S)
    owner.filled(S)
    assert entered == [torch.device("cuda", 0)] * 2


def test_a_handle_of_a_wrong_length_is_not_opened(fake, words):
    with pytest.raises(BadMessage, match="wrong length"):
        cuda.CudaDriver(fake, fake).open(torch.device("cuda", 0), 8, b"x" * 63, words.marks(0))


def test_the_page_is_pinned_once_and_unpinned_when_it_is_closed(fake):
    words = Words.make()
    block(fake, words.marks(0))
    block(fake, words.marks(1))
    assert [call[0] for call in fake.calls].count("cudaHostRegister") == 1
    words.close()
    words.close()
    assert [call[0] for call in fake.calls].count("cudaHostUnregister") == 1
