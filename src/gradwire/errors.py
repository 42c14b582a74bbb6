"""Every exception and warning gradwire raises.

GradwireError               a RuntimeError, so that programs written for torch still catch it
├── UsageError              gradwire was called wrongly
│   ├── UnknownWorker       no worker of that name or id has joined
│   ├── NotExposed          the callee's registry does not hold that function, method or class
│   ├── ArgumentTypeError   an argument has the wrong type (also a TypeError)
│   ├── NotSerializable     the data-only codec cannot encode a value
│   └── ContextClosed       a graph outlived the context that recorded it
├── PeerError               a peer failed
│   ├── PeerLost            its connection ended, or it went silent
│   │   ├── NotTrusted      it did not prove that it belongs to the job
│   │   └── StaleIncarnation    it was restarted, and what was asked for is lost
│   └── BadMessage          it sent something that no correct peer sends
│       └── OverLimit       it sent or holds more than `Limits` allow
├── DeadlinePassed          a wait timed out (also a TimeoutError)
│   ├── CallTimeout         a call was not answered before its deadline
│   ├── WaitTimeout         a future was not done in the time given to wait for it; its call goes on
│   ├── BackwardTimeout     a backward pass did not finish in time
│   └── JoinTimeout         not every worker arrived
├── Cancelled               the caller does not want the answer any more
├── StepFailed              an optimizer step failed on some worker
└── RemoteError             your function raised on another worker; also of the original type

GraphCutWarning             a tensor that requires grad was sent without its graph
RefLeakWarning              references were still counted when their owner shut down
"""

from __future__ import annotations

from typing import Self


class GradwireError(RuntimeError):
    """The base class. `hint` says what to do about the error.

    If it is about another worker, `peer` is its name, `link` its address, and `phase` the operation
    that failed: connect, call, forward, backward, step, commit or shutdown; empty if not known.
    """

    peer = link = phase = ""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def about(self, peer: str, *, link: str = "", phase: str = "") -> Self:
        """Set those of `peer`, `link` and `phase` that are still empty."""
        self.peer, self.link = self.peer or peer, self.link or link
        self.phase = self.phase or phase
        return self

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UsageError(GradwireError):
    """gradwire was called wrongly; nothing was sent."""


class UnknownWorker(UsageError):
    """No worker of that name or id has joined."""


class NotExposed(UsageError):
    """The registry of the callee does not hold that function, method or class."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument has the wrong type."""


class NotSerializable(UsageError):
    """The data-only codec cannot encode a value; `place` is the path to it in the arguments."""

    def __init__(self, message: str = "", *, place: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.place = place

    def inside(self, step: str) -> NotSerializable:
        """The same error with `step` prepended to the path."""
        return NotSerializable(self.message, place=step + self.place, hint=self.hint)

    def __str__(self) -> str:
        return f"{self.place}: {super().__str__()}" if self.place else super().__str__()


class ContextClosed(UsageError):
    """A graph was differentiated after the end of the context in which it was made."""


class PeerError(GradwireError):
    """A peer failed."""


class PeerLost(PeerError):
    """Its connection ended, or it went silent."""


class NotTrusted(PeerLost):
    """A peer, or its entry in the rendezvous store, did not prove that it belongs to the job."""


class StaleIncarnation(PeerLost):
    """A worker was restarted, and what was asked for is lost with its earlier incarnation."""


class BadMessage(PeerError):
    """A peer sent something that no correct peer sends."""


class OverLimit(BadMessage):
    """A peer sent or holds more than the `Limits` of the worker that refused it."""


class DeadlinePassed(GradwireError, TimeoutError):
    """A wait timed out; the message names the peer."""


class CallTimeout(DeadlinePassed):
    """A call was not answered before its deadline."""


class WaitTimeout(DeadlinePassed):
    """A future was not done in the time given to wait for it; its call goes on."""


class BackwardTimeout(DeadlinePassed):
    """An edge or a worker of a backward pass did not finish in time."""


class JoinTimeout(DeadlinePassed):
    """Not every worker arrived at the rendezvous."""


class Cancelled(GradwireError):
    """The caller does not want the answer any more: it cancelled the call, or was lost.

    Waiting for a cancelled future raises it, and so does the next use of gradwire by a function
    that still runs for such a call.
    """


class StepFailed(GradwireError):
    """An optimizer step failed on some worker.

    `stepped` names the workers whose parameters have changed, `unknown` those that did not answer.
    Both are empty, so that no parameter has changed, unless a worker failed after all had agreed to
    step, or the only worker did not answer.
    """

    def __init__(
        self,
        message: str = "",
        *,
        stepped: tuple[str, ...] = (),
        unknown: tuple[str, ...] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.stepped, self.unknown = stepped, unknown


class RemoteError(GradwireError):
    """Your function raised on another worker.

    The instance is also one of the original type if that is a builtin, a gradwire or an exposed
    one, so that `except ValueError` works as it does locally. It has the original's `args`, notes,
    `__cause__`, the members of a group, and the attributes that are plain data: numbers, strings,
    bytes, and containers of these. `message` is its text.
    """

    worker: str
    type_name: str
    remote_traceback: str

    def __init__(self, *args: object, hint: str | None = None) -> None:
        # The args of the original: Python copies an exception by calling its type with its args.
        Exception.__init__(self, *args)
        if not isinstance(self, BaseExceptionGroup):  # which has its own message
            self.message = str(args[0]) if args else ""
        self.hint = hint

    def __str__(self) -> str:
        kind = self.type_name.rpartition(":")[2]
        text = f"{kind} on {self.worker}: {self.message}"
        if self.remote_traceback:
            text = f"{text}\n\n--- traceback on {self.worker} ---\n{self.remote_traceback.rstrip()}"
        return text if self.hint is None else f"{text}\nhint: {self.hint}"


class GraphCutWarning(UserWarning):
    """A tensor that requires grad was sent without its graph: it will get no gradient.

    It was copied inside a module or another object; or, by torch's API, no context records it.
    """


class RefLeakWarning(UserWarning):
    """References were still counted when their owner shut down."""
