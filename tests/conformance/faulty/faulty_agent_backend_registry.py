"""The backend FAULTY_TENSORPIPE: it loses and delays messages of chosen kinds."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

from msgspec import structs

from gradwire.agent.serving.dispatch import Registered, Run
from gradwire.autograd.messages import Forget
from gradwire.compat.rpc import backend_registry
from gradwire.compat.rpc.agent import TensorPipeAgent
from gradwire.compat.rpc.options import TensorPipeRpcBackendOptions
from gradwire.errors import GradwireError, PeerLost
from gradwire.ids import WorkerId
from gradwire.rpc.messages import Accept, Call, Drop, Fetch, Fork
from gradwire.rpc.worker import Worker
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
    """Which messages of one worker fail, how often, and which come late: its interceptor."""

    def __init__(self, options: FaultyTensorPipeRpcBackendOptions) -> None:
        self._options = options
        self._lock = threading.RLock()
        self._failed: Counter[bytes] = Counter()

    def around(self, frame: Frame, registered: Registered, run: Run) -> tuple[Registered, Run]:
        """Handlers run as they are."""
        return registered, run

    def take_answer(self, take: Run, worker: WorkerId, channel: Channel, frame: Frame) -> None:
        """So do answers."""
        take(worker, frame)

    def send(self, to: WorkerId, channel: Channel, frame: Frame, deadline: float) -> None:
        """Send it, now or later, or fail."""
        late = self._seconds_late(frame)
        if not late:
            channel.send(frame, deadline)
            return
        copied = structs.replace(frame, payload=[bytes(part) for part in frame.payload])

        def send_late() -> None:
            with suppress(GradwireError):  # the caller that waits for an answer has a deadline
                channel.send(copied, time.monotonic() + late)

        later = threading.Timer(late, send_late)
        later.daemon = True
        later.start()

    def _seconds_late(self, frame: Frame) -> float:
        """How late a message is sent; InjectedLoss if it is not, the first few times."""
        names, options = names_of(frame), self._options
        if names.intersection(options.messages_to_fail):
            with self._lock:
                self._failed[frame.head] += 1
                if self._failed[frame.head] <= options.num_fail_sends:
                    raise InjectedLoss("RPCErr:2:a fault was injected on purpose")
        return max((options.messages_to_delay.get(name, 0.0) for name in names), default=0.0)


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Which messages fail and how often, and which come late, by how many seconds."""

    def __init__(
        self,
        *,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends


class FaultyTensorPipeAgent(TensorPipeAgent):
    """An agent that does not always do what it is told."""

    def _take(self, worker: Worker, opts: TensorPipeRpcBackendOptions) -> None:
        assert isinstance(opts, FaultyTensorPipeRpcBackendOptions)
        super()._take(worker, opts)
        worker.agent.interceptor = FaultPlan(opts)


def _options(rpc_timeout: float, init_method: str, **more: Any) -> object:
    return FaultyTensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout, init_method=init_method, **more
    )


if not backend_registry.backend_registered("FAULTY_TENSORPIPE"):
    backend_registry.register_backend(
        "FAULTY_TENSORPIPE",
        _options,
        partial(backend_registry._start_agent, agent_class=FaultyTensorPipeAgent),
    )
