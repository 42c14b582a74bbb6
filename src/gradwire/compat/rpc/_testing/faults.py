"""Links that lose and delay messages of chosen kinds, for programs that test themselves so."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import final

from msgspec.structs import replace

from gradwire.autograd.messages import Forget
from gradwire.errors import GradwireError, PeerLost
from gradwire.options import Limits
from gradwire.rpc.messages import Accept, Call, Drop, Fetch, Fork
from gradwire.transport.base import Channel, never
from gradwire.wire.message import IS_ANSWER, Frame, Kinds, kind_of

_CALLS = Kinds([Call])
_NAMES = {
    kind_of(Fork): {"RREF_FORK_REQUEST"},
    kind_of(Accept): {"RREF_CHILD_ACCEPT"},
    kind_of(Drop): {"RREF_USER_DELETE"},
    kind_of(Forget): {"CLEANUP_AUTOGRAD_CONTEXT_REQ"},
    kind_of(Fetch): {"PYTHON_RREF_FETCH_CALL", "SCRIPT_RREF_FETCH_CALL"},
}


def names_of(frame: Frame) -> set[str]:
    """What torch.distributed.rpc would call this message."""
    if frame.flags & IS_ANSWER:
        return set()
    if frame.kind != kind_of(Call):
        return _NAMES.get(frame.kind, set())
    call = _CALLS.decode(frame.kind, frame.head)
    assert isinstance(call, Call)
    runs = "SCRIPT" if call.function.startswith("!aten::") else "PYTHON"
    return {f"{runs}_CALL" if call.keep is None else f"{runs}_REMOTE_CALL"}


@final
class FaultPlan:
    """Which messages of one worker fail, how often, and which come late."""

    def __init__(self, fail: Sequence[str], times: int, delay: Mapping[str, float]) -> None:
        self._fail, self._times, self._delay = set(fail), times, dict(delay)
        self._lock = threading.RLock()
        self._failed: Counter[bytes] = Counter()

    def wrap(self, channel: Channel) -> Channel:
        """The same channel with these faults."""
        return FaultyChannel(channel, self)

    def fails(self, frame: Frame) -> bool:
        """Whether this sending of a message fails; the same message fails only so often."""
        if not names_of(frame) & self._fail:
            return False
        with self._lock:
            self._failed[frame.head] += 1
            return self._failed[frame.head] <= self._times

    def seconds_late(self, frame: Frame) -> float:
        """By how much a message is late."""
        return max((self._delay.get(name, 0.0) for name in names_of(frame)), default=0.0)


@final
class InjectedLoss(PeerLost):
    """A message does not leave by a channel that has not ended."""


@final
class FaultyChannel:
    """A channel that does not always do what it is told."""

    def __init__(self, inner: Channel, faults: FaultPlan) -> None:
        self._inner, self._faults = inner, faults
        self.peer_names, self.binding = inner.peer_names, inner.binding

    @property
    def limits(self) -> Limits:
        """Those of the channel itself."""
        return self._inner.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._inner.limits = limits

    def release_send_lock(self) -> bool:
        """See `Channel.release_send_lock`."""
        return self._inner.release_send_lock()

    def reacquire_send_lock(self) -> None:
        """See `Channel.release_send_lock`."""
        self._inner.reacquire_send_lock()

    @property
    def needs_heartbeat(self) -> bool:
        """See `Channel.needs_heartbeat`."""
        return self._inner.needs_heartbeat

    @property
    def remote(self) -> str:
        """The address of the other end."""
        return self._inner.remote

    @property
    def frames_received(self) -> int:
        """See `Channel.frames_received`."""
        return self._inner.frames_received

    def send_raw(self, data: bytes, deadline: float) -> None:
        """See `Channel.send_raw`; there is no handshake to disturb."""
        self._inner.send_raw(data, deadline)

    def recv_raw(self, length: int, deadline: float) -> bytes:
        """See `Channel.recv_raw`."""
        return self._inner.recv_raw(length, deadline)

    def send(self, frame: Frame, deadline: float) -> None:
        """Send it, now or later, or fail."""
        if self._faults.fails(frame):
            raise InjectedLoss("RPCErr:2:a fault was injected on purpose")
        late = self._faults.seconds_late(frame)
        if not late:
            self._inner.send(frame, deadline)
            return
        copied = replace(frame, payload=[bytes(part) for part in frame.payload])
        later = threading.Timer(late, self._send_late, [copied, late])
        later.daemon = True
        later.start()

    def _send_late(self, frame: Frame, late: float) -> None:
        try:
            self._inner.send(frame, time.monotonic() + late)
        except GradwireError:
            return  # whoever waits for an answer has a deadline

    def recv(self) -> Frame:
        """The next frame."""
        return self._inner.recv()

    def maybe_recv(self, until: float, done: Callable[[], bool] = never) -> Frame | None:
        """The next frame, if it comes by then."""
        return self._inner.maybe_recv(until, done)

    def close(self, reason: str = "close() was called") -> None:
        """End the connection."""
        self._inner.close(reason)
