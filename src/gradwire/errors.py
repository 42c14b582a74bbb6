"""Every exception and warning gradwire raises.

GradwireError              a RuntimeError, so that older programs still catch it
├── UsageError             you called us wrongly
│   ├── UnknownWorker      no worker of that name or id has joined
│   ├── NotExposed         the callee's registry does not hold that function, method or class
│   ├── ArgumentTypeError          an argument is not of the kind that is needed (also a TypeError)
│   ├── NotSerializable       a value that the data-only codec does not carry
│   └── ContextClosed      a graph outlived the context that recorded it
├── PeerError              a peer did not do its part
│   ├── PeerLost           its connection ended, or it went silent
│   │   ├── NotTrusted     it did not prove that it belongs to the job
│   │   └── StaleIncarnation    it was started again; what was asked for was lost with its earlier
life │   └── BadMessage         it sent something no correct peer sends │       └── OverLimit
it sent or holds more than `Limits` let it ├── DeadlinePassed         a wait was given up (also a
TimeoutError) │   ├── CallTimeout        nobody answered a call before its deadline │   ├──
BackwardTimeout    an edge or a worker of a backward pass did not finish in time │   └── JoinTimeout
not every worker arrived ├── Cancelled              whoever made the call does not want its answer
any more ├── StepFailed             an optimizer's step failed on some worker; says who has stepped
└── RemoteError            your function raised on another worker; also of the original type

GraphCutWarning            a tensor that requires grad crossed without its graph
RefLeakWarning             references were still counted when their owner shut down
"""

from __future__ import annotations

from typing import Self


class GradwireError(RuntimeError):
    """The root of all of them. `hint` says what to do about it.

    Where it is about another worker, `peer` is its name, `link` the address it was spoken with, and
    `phase` what was under way: connect, call, forward, backward, step, commit or shutdown. They
    are empty where they are not known.
    """

    peer = link = phase = ""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def about(self, peer: str, *, link: str = "", phase: str = "") -> Self:
        """Say whom it is about; what is known already stays."""
        self.peer, self.link = self.peer or peer, self.link or link
        self.phase = self.phase or phase
        return self

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UsageError(GradwireError):
    """You called us wrongly; nothing was sent."""


class UnknownWorker(UsageError):
    """No worker of that name or id has joined."""


class NotExposed(UsageError):
    """The registry of the worker asked does not hold that function, method or class."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument is not of the kind that is needed."""


class NotSerializable(UsageError):
    """A value that the data-only codec does not carry; `place` says where it sits."""

    def __init__(self, message: str = "", *, place: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.place = place

    def inside(self, step: str) -> NotSerializable:
        """The same error, seen from the container whose `step` leads to the value."""
        return NotSerializable(self.message, place=step + self.place, hint=self.hint)

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return text if self.hint is None else f"{text}\nhint: {self.hint}"


class ContextClosed(UsageError):
    """A graph outlived the context that recorded it."""


class PeerError(GradwireError):
    """A peer did not do its part."""


class PeerLost(PeerError):
    """Its connection ended, or it went silent."""


class NotTrusted(PeerLost):
    """A peer, or what it left at the meeting place, did not prove that it belongs to the job."""


class StaleIncarnation(PeerLost):
    """A worker was started again, and what was asked for belonged to its earlier life."""


class BadMessage(PeerError):
    """It sent something no correct peer sends."""


class OverLimit(BadMessage):
    """It sent or holds more than the limits of the worker that refused it; see `Limits`."""


class DeadlinePassed(GradwireError, TimeoutError):
    """A wait was given up; the message says on whom."""


class CallTimeout(DeadlinePassed):
    """Nobody answered a call before its deadline."""


class BackwardTimeout(DeadlinePassed):
    """An edge or a worker of a backward pass did not finish in time."""


class JoinTimeout(DeadlinePassed):
    """Not every worker arrived at the rendezvous."""


class Cancelled(GradwireError):
    """Whoever made the call does not want its answer any more: it was interrupted, or lost.

    Waiting for a future that was cancelled raises it, and so does the next use of gradwire by a
    function that still runs for such a call.
    """


class StepFailed(GradwireError):
    """A step of an optimizer failed on some worker; it is all or nothing where that can be.

    `stepped` names the workers whose parameters have changed, `unknown` those that did not say.
    Both are empty unless a worker failed at the very end, after all had said that they can step, or
    the only worker did not answer.
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

    The instance you catch is also one of the original type where that type is a builtin, one of
    ours or an exposed one, so `except ValueError` works as it did locally. It has the original's
    `args`, notes, `__cause__`, the members of a group, and the attributes that are plain data:
    numbers, texts, bytes, and containers of these. `message` is its text.
    """

    worker: str
    type_name: str
    remote_traceback: str

    def __init__(self, *args: object, hint: str | None = None) -> None:
        # Those of the original: Python copies an exception by calling its type with its args.
        Exception.__init__(self, *args)
        if not isinstance(self, BaseExceptionGroup):  # which has a message of its own
            self.message = str(args[0]) if args else ""
        self.hint = hint

    def __str__(self) -> str:
        kind = self.type_name.rpartition(":")[2]
        story = f"{kind} on {self.worker}: {self.message}"
        if self.remote_traceback:
            story = (
                f"{story}\n\n--- traceback on {self.worker} ---\n{self.remote_traceback.rstrip()}"
            )
        return story if self.hint is None else f"{story}\nhint: {self.hint}"


class GraphCutWarning(UserWarning):
    """A tensor that requires grad crossed without its graph: it will get no gradient.

    No context records the call, or the tensor was copied inside a module or another object.
    """


class RefLeakWarning(UserWarning):
    """References were still counted when their owner shut down."""
