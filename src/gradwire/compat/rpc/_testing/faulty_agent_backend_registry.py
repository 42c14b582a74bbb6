"""The backend FAULTY_TENSORPIPE: channels that lose and delay messages of chosen kinds."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast, final

from msgspec import structs

from gradwire.autograd.messages import Forget
from gradwire.compat.rpc import backend_registry, constants
from gradwire.compat.rpc.agent import TensorPipeAgent
from gradwire.compat.rpc.options import TensorPipeRpcBackendOptions
from gradwire.errors import GradwireError, PeerLost
from gradwire.options import Limits
from gradwire.rpc.behavior import Behavior
from gradwire.rpc.messages import Accept, Call, Drop, Fetch, Fork
from gradwire.transport.base import Channel
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

    def seconds_late(self, frame: Frame) -> float:
        """How late a message is sent; InjectedLoss if it is not, the first few times."""
        names = names_of(frame)
        if names & self._fail:
            with self._lock:
                self._failed[frame.head] += 1
                if self._failed[frame.head] <= self._times:
                    raise InjectedLoss("RPCErr:2:a fault was injected on purpose")
        return max((self._delay.get(name, 0.0) for name in names), default=0.0)


@final
class InjectedLoss(PeerLost):
    """A message was not sent, over a channel that has not ended."""


@final
class FaultyChannel:
    """A channel that does not always do what it is told; all but `send` is the inner one's."""

    def __init__(self, inner: Channel, faults: FaultPlan) -> None:
        self._inner, self._faults = inner, faults

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._inner, name)

    @property
    def limits(self) -> Limits:
        """Of the inner one; a property, as they are set too."""
        return self._inner.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._inner.limits = limits

    def send(self, frame: Frame, deadline: float) -> None:
        """Send it, now or later, or fail."""
        late = self._faults.seconds_late(frame)
        if not late:
            self._inner.send(frame, deadline)
            return
        copied = structs.replace(frame, payload=[bytes(part) for part in frame.payload])

        def send_late() -> None:
            with suppress(GradwireError):  # the caller that waits for an answer has a deadline
                self._inner.send(copied, time.monotonic() + late)

        later = threading.Timer(late, send_late)
        later.daemon = True
        later.start()


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Which messages fail and how often, and which come late, by how many seconds."""

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method
        )
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends


class FaultyTensorPipeAgent(TensorPipeAgent):
    """An agent whose channels do not always do what they are told."""

    def _behavior(self, opts: TensorPipeRpcBackendOptions) -> Behavior:
        assert isinstance(opts, FaultyTensorPipeRpcBackendOptions)
        faults = FaultPlan(opts.messages_to_fail, opts.num_fail_sends, opts.messages_to_delay)

        def wrap(channel: Channel) -> Channel:
            return cast(Channel, FaultyChannel(channel, faults))

        return replace(super()._behavior(opts), channel=wrap)


def _options(rpc_timeout: float, init_method: str, **more: Any) -> object:  # noqa: ANN401
    return FaultyTensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout, init_method=init_method, **more
    )


if not backend_registry.backend_registered("FAULTY_TENSORPIPE"):
    backend_registry.register_backend(
        "FAULTY_TENSORPIPE",
        _options,
        partial(backend_registry._start_agent, agent_class=FaultyTensorPipeAgent),
    )
