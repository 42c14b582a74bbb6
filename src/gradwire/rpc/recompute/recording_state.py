"""What a checkpoint's forward recorded: its calls in order, and the random state each returned.

Pure: no torch, no threads. The k-th call of the recomputation repeats the k-th of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from gradwire.errors import UsageError

State = tuple[bytes, ...]
"""of the generators of one worker: that of the CPU, then those of its devices"""
CallKey = tuple[int, str]
"""the worker that was called, and the function"""


def no_poll(_: bool) -> None:
    """The `poll` of a call about which nothing more will be learned."""


@dataclass(slots=True, eq=False)
class RecordedCall:
    """One call of a forward, and what its callee returned to repeat it."""

    key: CallKey
    known: bool = False
    """whether its answer has come"""
    lost: bool = False
    """whether it failed without an answer: then no result of it was used"""
    drawn: bytes = b""
    """random state, encrypted by the callee; empty if no random number was drawn"""
    poll: Callable[[bool], None] = no_poll
    """check whether the answer has come; with True, wait for it"""

    def answered(self, drawn: bytes) -> None:
        """The call returned or raised; only the first report counts."""
        if not self.known:
            # `drawn` before `known`: another thread that sees `known` must also see `drawn`.
            self.drawn = drawn
            self.known = True

    def failed(self) -> None:
        """No answer will come: the callee was lost, or the call timed out."""
        self.lost = not self.known


UNKNOWN_CALL = RecordedCall((-1, ""))
"""a call that the forward did not make, or made from another thread"""


@final
class Recording:
    """The calls and generator states of one forward; a recomputation replays it, maybe repeatedly.

    `start` and `end` are the states of the generators before and after the function; `raised` is
    whether it raised.
    """

    def __init__(self, start: State = (), end: State | bytes = (), *, raised: bool = False) -> None:
        self.start, self.end, self.raised = start, end, raised
        self.calls: list[RecordedCall] = []
        self.after_waits: dict[int, State] = {}
        """state after the n-th wait, if other code drew from the generators during it"""
        self.is_interleaved = False
        """whether other code may have drawn while this function was running, outside of a wait"""

    @property
    def has_drawn(self) -> bool:
        """Whether the function or its callees drew: whether there is anything to restore."""
        return self.has_drawn_here or any(call.drawn for call in self.calls)

    @property
    def has_drawn_here(self) -> bool:
        """Whether the function drew on this worker."""
        return bool(self.start != self.end or self.after_waits)

    def answered_calls(self, *, wait: bool = False) -> Sequence[RecordedCall]:
        """All calls but the lost ones: a lost call that was retried counts once."""
        for call in self.calls:
            call.poll(wait)
        return [call for call in self.calls if not call.lost]

    def repeated(self, n: int, key: CallKey) -> RecordedCall:
        """The call of the forward that the n-th call of the recomputation repeats."""
        calls = self.answered_calls(wait=True)
        if n >= len(calls):
            return UNKNOWN_CALL
        if calls[n] is not UNKNOWN_CALL and calls[n].key != key and self.has_drawn:
            raise UsageError(
                f"the recomputation of a checkpoint calls {key[1]} on w{key[0]} where its forward "
                f"called {calls[n].key[1]} on w{calls[n].key[0]}: it cannot repeat the random "
                "numbers that were drawn there",
                hint="the function of a checkpoint must make the same calls each time it runs",
            )
        return calls[n]
