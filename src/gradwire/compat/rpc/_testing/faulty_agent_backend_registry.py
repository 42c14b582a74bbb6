"""The backend FAULTY_TENSORPIPE: channels that lose and delay messages of chosen kinds."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast, final

from msgspec import structs

from gradwire.autograd.messages import Forget
from gradwire.compat.rpc import backend_registry
from gradwire.compat.rpc.agent import TensorPipeAgent
from gradwire.compat.rpc.options import TensorPipeRpcBackendOptions
from gradwire.errors import GradwireError, PeerLost
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


@final
class InjectedLoss(PeerLost):
    """A message was not sent, over a channel that has not ended."""


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

    def __init__(self, options: FaultyTensorPipeRpcBackendOptions) -> None:
        self._options = options
        self._lock = threading.RLock()
        self._failed: Counter[bytes] = Counter()

    def seconds_late(self, frame: Frame) -> float:
        """How late a message is sent; InjectedLoss if it is not, the first few times."""
        names, options = names_of(frame), self._options
        if names.intersection(options.messages_to_fail):
            with self._lock:
                self._failed[frame.head] += 1
                if self._failed[frame.head] <= options.num_fail_sends:
                    raise InjectedLoss("RPCErr:2:a fault was injected on purpose")
        return max((options.messages_to_delay.get(name, 0.0) for name in names), default=0.0)


@final
class FaultyChannel:
    """A channel that does not always do what it is told; all but `send` is the inner one's."""

    def __init__(self, inner: Channel, faults: FaultPlan) -> None:
        self._inner, self._faults = inner, faults

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._inner, name)

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
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        **common: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**common)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends


class FaultyTensorPipeAgent(TensorPipeAgent):
    """An agent whose channels do not always do what they are told."""

    def _behavior(self, opts: TensorPipeRpcBackendOptions) -> Behavior:
        assert isinstance(opts, FaultyTensorPipeRpcBackendOptions)
        faults = FaultPlan(opts)
        wrap = cast(Callable[[Channel], Channel], partial(FaultyChannel, faults=faults))
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
