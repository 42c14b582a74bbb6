"""Code that runs for a checkpoint: its forward, or the recomputation, here or on a callee.

Note [Random numbers under a checkpoint]:
    `torch.utils.checkpoint` runs a function twice and, with preserve_rng_state, puts the generator
    back for the second run. A callee draws from a generator of its own, so its state has to be put
    back, too. While a forward runs, each call asks its callee to note the state at which the
    function began; it comes home with the answer, sealed (sealing.py), and with it those of the
    calls that the function has made in turn. The recomputation sends it along; the callee runs the
    function from that state and puts back its own. A callee whose function draws nothing sends
    nothing, and one that is not called by a checkpoint notes nothing.

    A callee that raises sends the same home with its error: the caller may catch it and go on.
    Before a callee answers, it waits for the answers to its own calls: what they drew belongs to
    what it sends home.

    The generators belong to the process, and functions run in many threads. Code that runs for a
    checkpoint therefore takes turns (random_streams.py). It gives its turn away while it waits for
    a call, a future or a value: the function that it waits for may have to draw here. Each wait is
    counted, and the tape notes the state after a wait if others have moved the generators
    meanwhile. Functions that no checkpoint calls take no turns. If one of them draws in between,
    the repetition on a callee ends at another state than the first run, and is refused.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Self, cast, final

import msgspec

from gradwire import current
from gradwire.agent.agent import Agent, Outcome
from gradwire.agent.remote_errors import note_of
from gradwire.agent.requests.promise import Promise
from gradwire.errors import GradwireError, RemoteError, UsageError
from gradwire.rpc.messages import Draws, Result, ValueReady
from gradwire.rpc.recompute.random_streams import Stream
from gradwire.rpc.recompute.sealing import opened, sealed
from gradwire.rpc.recompute.tape_state import UNKNOWN, Key, Place, State, Tape, nothing_new


class _Drawn(msgspec.Struct, frozen=True, array_like=True):
    """What a callee needs to repeat a call, for itself only."""

    state: State
    end: bytes
    raised: bool
    after: dict[int, State]
    calls: list[tuple[Key, bool, bytes]]


_decoder = msgspec.msgpack.Decoder(_Drawn)


_NO_DIGEST = b"mixed"
"""the end of a function that is not to be repeated if it draws"""


def _digest(state: State) -> bytes:
    return hashlib.blake2b(b"".join(state), digest_size=16).digest()


def tape_of(drawn: bytes, function: str) -> Tape:
    """What this worker has noted when the call was made for the first time."""
    if not drawn:
        return Tape()
    noted = _decoder.decode(opened(drawn, function))
    tape = Tape(noted.state, noted.end, raised=noted.raised)
    tape.after = noted.after
    tape.places = [Place(key, known, drawn=drawn) for key, known, drawn in noted.calls]
    return tape


def _noted(tape: Tape, function: str, *, wait: bool) -> bytes:
    """To be sent home; nothing, if there is nothing to repeat."""
    places = tape.answered_places(wait=wait)
    if not tape.has_drawn and all(place.known for place in places):
        return b""
    assert isinstance(tape.end, tuple)
    calls = [(place.key, place.known, place.drawn) for place in places]
    end = _NO_DIGEST if tape.is_mixed else _digest(tape.end)
    noted = _Drawn(tape.state, end, tape.raised, tape.after, calls)
    return sealed(msgspec.msgpack.encode(noted), function)


class Asked(NamedTuple):
    """A call that is made for a checkpoint."""

    session: Session
    place: Place
    draws: Draws

    def sent(self, promise: Promise[Outcome], agent: Agent) -> Self:
        """Its answer tells what was drawn, whoever waits for it."""
        place = self.place
        if not self.draws.again:

            def look(wait: bool) -> None:
                if wait:
                    agent.wait(place.key[0], lambda: promise.settled, promise.wait)
                if promise.settled:
                    _heard(place, promise.wait())

            place.look = look
            promise.on_settled(lambda outcome: _heard(place, outcome))
        return self


def _heard(place: Place, outcome: Outcome) -> None:
    if isinstance(outcome, RemoteError):
        place.answered(note_of(outcome))
    elif isinstance(outcome, Exception):
        place.failed()
    elif isinstance(outcome.message, Result | ValueReady):
        place.answered(outcome.message.draws)
    place.look = nothing_new  # what was there holds the answer


@final
class Session:
    """One run of such code, in one thread; `outer` is the one around it there.

    A forward has a tape to write to. A repetition has one to repeat, and hides those around it: it
    is not part of their forward.
    """

    def __init__(self, stream: Stream, tape: Tape, *, again: bool) -> None:
        self.stream = stream
        self.tape = tape if again else None
        """to be repeated"""
        self.written = None if again else tape
        self.thread = threading.get_ident()
        self._calls = self._waits = 0
        self._is_over = False
        """it may still be found, by callbacks of futures that it has left behind"""
        self.is_mixed = False
        """whether others may have drawn at the same time, beside the turns"""
        around = current_session()
        self.outer = around if around is not None and around._goes_on_here(stream) else None

    def __enter__(self) -> Self:
        if self.tape is not None and self.tape.is_mixed and self.tape.has_drawn_here:
            raise UsageError(_MIXED, hint=_MIXED_HINT)
        self._has_turn = self.outer is None and self.stream.take_turn()
        self._overlaps = self.stream.overlaps if self._has_turn else -1
        try:
            self._before = self.stream.state()
            if self.written is not None:
                self.written.state = self._before
            elif self.tape is not None and self.tape.state:
                self.stream.put(self.tape.state)
        except BaseException:
            self._end_turn()
            raise
        self._token = current.push_checkpoint_run(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._is_over = True
        try:
            current.pop_deadline(self._token)
            now = self.stream.state()
            self._find_overlaps()
            if self.written is not None:
                self.written.end = now
                self.written.is_mixed = self.is_mixed
            elif now != self._before:
                self.stream.put(self._before)
        finally:
            self._end_turn()
        begin = () if self.tape is None else self.tape.state or self._before
        is_wrong = self.tape is not None and self.is_mixed and now != begin
        # An error of the function's own may tell of a number; that torch stops it early does not
        # matter; an error of gradwire's explains itself.
        if is_wrong and not isinstance(error, GradwireError):
            raise UsageError(_MIXED, hint=_MIXED_HINT) from error

    def _find_overlaps(self) -> None:
        """Whether others may have drawn since this code began, or had its turn back."""
        every = list(self._ancestry())
        if self.stream.overlaps != every[-1]._overlaps:
            for run in every:
                run.is_mixed = True

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self.stream.end_turn()
        elif self.outer is None:  # for the one who has the turn by now
            self.stream.overlaps += 1

    def _goes_on_here(self, stream: Stream) -> bool:
        return not self._is_over and self.thread == threading.get_ident() and self.stream is stream

    def calling(self, key: Key) -> Asked | None:
        """This code makes a call; None if its callee need not know of the checkpoint."""
        if self._is_over:
            return None
        runs = self._runs()
        again, is_elsewhere = runs[-1].tape, threading.get_ident() != self.thread
        if is_elsewhere:  # in no order: who repeats it is told if it draws
            return None if again is None else Asked(self, UNKNOWN, Draws(True, b"", False))
        place = Place(key) if again is None else again.repeated(runs[-1]._calls, key)
        for run in runs:
            run._calls += 1
            if run.written is not None:
                run.written.places.append(place)
        return Asked(self, place, Draws(again is not None, place.drawn, place.known))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for a call: others may draw meanwhile."""
        if self._is_over or threading.get_ident() != self.thread:
            yield
            return
        mine, stream, every = self.stream.state(), self.stream, list(self._ancestry())
        repeats = [run for run in every if run.tape is not None]
        if repeats:  # the outermost has what the generators are for everybody else
            stream.put(repeats[-1]._before)
        self._find_overlaps()
        every[-1]._end_turn()
        try:
            yield
        finally:
            every[-1]._has_turn = stream.take_turn()
            every[-1]._overlaps = stream.overlaps if every[-1]._has_turn else -1
            now = stream.state()
            if repeats:
                repeats[-1]._before, now = now, self._noted_after(mine)
                stream.put(now)
            for run in self._runs():
                if run.written is not None and now != mine:
                    run.written.after[run._waits] = now
                run._waits += 1

    def _noted_after(self, mine: State) -> State:
        last = self._runs()[-1]
        return mine if last.tape is None else last.tape.after.get(last._waits, mine)

    def _ancestry(self) -> Iterator[Session]:
        run: Session | None = self
        while run is not None:
            yield run
            run = run.outer

    def _runs(self) -> list[Session]:
        """Those that this code is a part of: up to the one that is repeated, if there is one."""
        found: list[Session] = []
        for run in self._ancestry():
            found.append(run)
            if run.tape is not None:
                break
        return found


current_session = cast(Callable[[], Session | None], current.current_checkpoint_run)
"""that of the code that runs, if it runs for a checkpoint"""


def waiting() -> AbstractContextManager[None]:
    """The block waits for another worker: others may draw here, if this is such code."""
    session = current_session()
    return _AS_IT_IS if session is None else session.waiting()


_AS_IT_IS: AbstractContextManager[None] = nullcontext()


@final
class Served:
    """A function that a checkpoint of a peer's calls, here."""

    def __init__(self, stream: Stream, draws: Draws, function: str, me: str) -> None:
        self._draws, self._function, self._me = draws, function, me
        self._tape = tape_of(draws.state, function) if draws.again else Tape()
        self._session = Session(stream, self._tape, again=draws.again)
        self._stream = stream
        self._end: State = ()

    def __enter__(self) -> None:
        self._session.__enter__()
        self._begin = self._stream.state()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end = self._stream.state()
        self._session.__exit__(kind, error, traceback)

    def note(self, error: BaseException | None = None, *, wait: bool = True) -> bytes:
        """The function has returned, or raised: what goes home, so that it can be repeated.

        Waits for the calls that the function has made and did not wait for: in one process they
        would be over by now. Their deadlines end before that of the function.
        """
        tape = self._tape
        if not self._draws.again:
            tape.raised = error is not None
            return _noted(tape, self._function, wait=wait)
        if self._end == self._begin or _digest(self._end) == tape.end:
            return b""
        if error is None or tape.raised or not tape.state:
            raise UsageError(self._story(), hint=_HINT) from error
        return b""  # only now it raises: the error is more telling than how much it has drawn

    def later_note(self, error: BaseException | None = None) -> bytes:
        """The same for a function that has returned a future, once that is done.

        Does not wait: the thread that completes a future may be the one that reads the answers.
        """
        if not self._draws.again and self._stream.state() != self._end:
            raise UsageError(
                f"random numbers were drawn on {self._me} between {self._function} and the future "
                "that it returned: a checkpoint that calls it could not draw them again",
                hint=_HINT,
            )
        return self.note(error, wait=False)

    def _story(self) -> str:
        story = f"{self._function} on {self._me} draws random numbers in the recomputation of a "
        if not self._draws.known:
            return (
                f"{story}checkpoint, and those of its forward are not known: its forward did not "
                "call it here, or called it from another thread than the checkpoint's, or did not "
                "wait for it before a future that depends on it was done"
            )
        if not self._tape.end:
            return f"{story}checkpoint, but drew none in its forward"
        return (
            f"{story}checkpoint, but not those of its forward: it drew a different number of them, "
            "or another function did on the same worker meanwhile, or a device was first used then"
        )


_MIXED = (
    "the random numbers of a checkpoint's forward cannot be drawn again: another function that a "
    "checkpoint calls ran on this worker at the same time. It got no turn, because the one before "
    "it took too long, or waited for it where gradwire cannot see that (torch.futures.wait_all, an "
    "event, a thread pool)"
)
_MIXED_HINT = (
    "wait for each future with wait(), or checkpoint(preserve_rng_state=False) if it does not "
    "matter which numbers are drawn"
)
_HINT = (
    "let no other function draw there at the same time (Options(threads=1) runs one after the "
    "other), or checkpoint(preserve_rng_state=False) if it does not matter which numbers are drawn"
)
