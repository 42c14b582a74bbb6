"""One run of a checkpoint's function, forward or recomputation, on the caller or on a callee.

torch has no hook to learn of such a run. So both kinds of checkpoint (reentrant and not) are
wrapped, at the end of this file, where each has the function at hand.

Note [Random numbers under a checkpoint]:
    `torch.utils.checkpoint` runs a function in the forward pass and again in the backward pass
    (the recomputation). With preserve_rng_state it restores the random generators before the
    second run, so that dropout draws the same mask: those of the caller's process only.

    Forward: each call tells its callee that it runs under a checkpoint. The callee returns, with
    the answer, the state of its generators before the function, and the states that its own
    callees returned to it. If nothing was drawn, nothing is returned.
    Recomputation: the k-th call sends back what the k-th call of the forward returned. The callee
    sets its generators to that state, runs the function, and then restores its own state.

    An answer that is an error has the state, too, because the caller may catch the error and go
    on. A callee waits for the answers to its own calls before it answers: their states are part of
    what it returns.

    Generators belong to the process, and functions run in many threads. So code that runs for a
    checkpoint takes turns (Generators). It ends its turn while it waits for a call, a future or
    a value, because the function it waits for may have to draw here. Waits are numbered, and if
    other code drew during one, the state after it is recorded. Functions that no checkpoint calls
    take no turns. If one of them draws in between, the recomputation on a callee ends in another
    state than the forward, and is refused.

    A process without a worker, and preserve_rng_state=False, are left to torch's own code.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Self, cast, final

import torch
from torch.utils import checkpoint as _checkpoint

from gradwire.agent.agent import Agent, Outcome
from gradwire.agent.remote_errors import note_of
from gradwire.agent.requests.promise import Promise
from gradwire.current import current_worker, get_current, swap_checkpoint_run
from gradwire.errors import GradwireError, RemoteError, UsageError
from gradwire.rpc.messages import Draws, Result, ValueReady
from gradwire.rpc.recompute.left_open import Checkpoint, begun
from gradwire.rpc.recompute.recording import (
    UNKNOWN_CALL,
    CallKey,
    RecordedCall,
    Recording,
    State,
    decoded,
    digest,
    encoded,
)


@final
class Generators:
    """The random generators that functions of a worker draw from, and the lock around their use."""

    def __init__(self, own: torch.Generator | None = None) -> None:
        self._cpu, self._has_devices = own or torch.default_generator, own is None
        self._turn = threading.Lock()
        # For a turn; half of the time left to the caller, if that is shorter. Code with a turn may
        # wait for this code where gradwire cannot see that (`torch.futures.wait_all`, an event, a
        # thread pool). Then both run, and a recomputation of what they drew meanwhile is refused.
        self.max_wait_seconds = 10.0
        self.overlaps = 0
        """changes when code that did not get a turn begins or ends"""

    def take_turn(self) -> bool:
        """Acquire the lock; False if that took too long."""
        if self._turn.acquire(blocking=False):
            return True
        _, deadline, *_ = get_current()
        left = (deadline - time.monotonic()) / 2
        taken = self._turn.acquire(timeout=max(0.0, min(self.max_wait_seconds, left)))
        self.overlaps += not taken
        return taken

    def end_turn(self) -> None:
        """Release the lock."""
        self._turn.release()

    def get_state(self) -> State:
        """The states of all generators in use: the CPU's, then those of the devices."""
        devices = [device.get_rng_state(i) for device, i in self._devices()]
        states = [self._cpu.get_state(), *devices]
        return tuple(ctypes.string_at(state.data_ptr(), state.numel()) for state in states)

    def set_state(self, state: State) -> None:
        """Restore what `get_state` returned."""
        cpu, *others = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in state)
        self._cpu.set_state(cpu)
        for (device, i), part in zip(self._devices(), others, strict=False):
            device.set_rng_state(part, i)

    def _devices(self) -> list[tuple[Any, int]]:
        """Each accelerator device of this process with its torch module; none before first use."""
        accelerator = torch.accelerator.current_accelerator() if self._has_devices else None
        device = None if accelerator is None else torch.get_device_module(accelerator)
        if not getattr(device, "_initialized", False):  # get_rng_state would initialize the device
            return []
        return [(device, i) for i in range(torch.accelerator.device_count())]


PROCESS = Generators()
"""shared by all workers of this process that have no generator of their own"""


class CheckpointedCall(NamedTuple):
    """A call that is made under a checkpoint; `draws` is sent with it."""

    run: CheckpointRun
    recorded: RecordedCall
    draws: Draws

    def sent(self, promise: Promise[Outcome], agent: Agent) -> Self:
        """The call has left: record the random state that its answer carries."""
        recorded = self.recorded
        if not self.draws.again:

            def poll(wait: bool) -> None:
                if wait:
                    agent.wait_for(recorded.key[0], promise)
                if promise.settled:
                    _record_answer(recorded, promise.wait())

            recorded.poll = poll
            promise.on_settled(partial(_record_answer, recorded))
        return self


def _record_answer(recorded: RecordedCall, outcome: Outcome) -> None:
    if isinstance(outcome, RemoteError):
        recorded.answered(note_of(outcome))
    elif isinstance(outcome, Exception):
        recorded.failed()
    elif isinstance(outcome.message, Result | ValueReady):
        recorded.answered(outcome.message.draws)
    recorded.poll = None  # the closure that was there keeps the answer alive


@final
class CheckpointRun:
    """One run of a checkpoint's function, in one thread.

    A forward writes a recording (`recorded`). A recomputation reads one (`replayed`); it is not
    part of the forwards around it, so it writes nothing into their recordings.
    """

    def __init__(
        self, generators: Generators, recording: Recording, *, is_recomputation: bool
    ) -> None:
        self.generators = generators
        self.replayed = recording if is_recomputation else None
        self.recorded = None if is_recomputation else recording
        self.thread = threading.get_ident()
        self._calls = self._waits = 0
        self.begin: State = ()
        self.end: State = ()
        """the states of the generators when the function begins and ends"""
        self._is_over = False
        """callbacks of futures that the function left behind still find this run"""
        self.is_interleaved = False
        """whether code without a turn ran at the same time, and may have drawn"""
        around = current_checkpoint_run()
        self._outer: Runs = ()
        """the runs around this one in its thread, innermost first"""
        self._forwards: Runs = ()
        """those of them whose forward this one is part of, up to the nearest recomputation"""
        if around is not None and around._is_here() and around.generators is generators:
            self._outer = (around, *around._outer)
            self._forwards = () if is_recomputation else (around, *around._forwards)

    def __enter__(self) -> Self:
        replayed = self.replayed
        if replayed is not None and replayed.is_interleaved and replayed.has_drawn_here:
            raise UsageError(_INTERLEAVED, hint=_INTERLEAVED_HINT)
        # The outermost run of a thread takes the turn for those inside it.
        self._has_turn = not self._outer and self.generators.take_turn()
        self._overlaps = self.generators.overlaps if self._has_turn else -1
        try:
            self._before = self.begin = self.generators.get_state()
            if self.recorded is not None:
                self.recorded.start = self._before
            elif replayed is not None and replayed.start:
                self.generators.set_state(replayed.start)
                self.begin = self.generators.get_state()
        except BaseException:
            self._end_turn()
            raise
        self._around = swap_checkpoint_run(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._is_over = True
        try:
            # Not a reset to the slot as it was, which may be that of another context, or thread:
            # see Note [A checkpoint whose function raises], left_open.py.
            run = current_checkpoint_run()
            if run is self or (run is not None and self in run._outer):
                swap_checkpoint_run(self._around)
            self.end = self.generators.get_state()
            self._find_overlaps()
            if self.recorded is not None:
                self.recorded.end = self.end
                self.recorded.is_interleaved = self.is_interleaved
            elif self.end != self._before:
                self.generators.set_state(self._before)
        finally:
            self._end_turn()
        is_wrong = self.replayed is not None and self.is_interleaved and self.end != self.begin
        # Other numbers than in the forward may have caused an error of the function, so it is
        # replaced; so is the exception by which torch stops a recomputation early. An error of
        # gradwire's explains itself.
        if is_wrong and not isinstance(error, GradwireError):
            raise UsageError(_INTERLEAVED, hint=_INTERLEAVED_HINT) from error

    def _find_overlaps(self) -> None:
        """Mark the runs of this thread if code without a turn ran since their turn began."""
        runs = (self, *self._outer)
        if self.generators.overlaps != runs[-1]._overlaps:
            for run in runs:
                run.is_interleaved = True

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self.generators.end_turn()
        elif not self._outer:  # this code had no turn: the one that has it must notice
            self.generators.overlaps += 1

    def _is_here(self) -> bool:
        """Whether the current code runs inside this function, on its thread."""
        return not self._is_over and self.thread == threading.get_ident()

    def calling(self, key: CallKey) -> CheckpointedCall | None:
        """This code makes a call; None if its callee need not know of the checkpoint."""
        if self._is_over:
            return None
        runs = (self, *self._forwards)
        replayed = runs[-1].replayed
        if not self._is_here():  # calls of other threads have no order: no recomputation may draw
            unknown = CheckpointedCall(self, UNKNOWN_CALL, Draws(True, b"", False))
            return None if replayed is None else unknown
        call = RecordedCall(key) if replayed is None else replayed.repeated(runs[-1]._calls, key)
        for run in runs:
            run._calls += 1
            if run.recorded is not None:
                run.recorded.calls.append(call)
        return CheckpointedCall(self, call, Draws(replayed is not None, call.drawn, call.known))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside the block this code waits for a call, and other code may draw."""
        if not self._is_here():
            yield
            return
        generators, every = self.generators, (self, *self._outer)
        mine = generators.get_state()
        recomputations = [run for run in every if run.replayed is not None]
        # Other code must see the state that was there before the outermost recomputation.
        if recomputations:
            generators.set_state(recomputations[-1]._before)
        self._find_overlaps()
        every[-1]._end_turn()
        try:
            yield
        finally:
            every[-1]._has_turn = generators.take_turn()
            every[-1]._overlaps = generators.overlaps if every[-1]._has_turn else -1
            now = generators.get_state()
            if recomputations:
                nearest, outermost = recomputations[0], recomputations[-1]
                assert nearest.replayed is not None
                outermost._before, now = now, nearest.replayed.after_waits.get(nearest._waits, mine)
                generators.set_state(now)
            for run in (self, *self._forwards):
                if run.recorded is not None and now != mine:
                    run.recorded.after_waits[run._waits] = now
                run._waits += 1


Runs = tuple[CheckpointRun, ...]


def current_checkpoint_run() -> CheckpointRun | None:
    """The run that the current code is part of, if any."""
    return cast(CheckpointRun | None, get_current()[3])


_NO_CHECKPOINT: AbstractContextManager[None] = nullcontext()


def waiting() -> AbstractContextManager[None]:
    """A block that waits for another worker; under a checkpoint, it ends the turn meanwhile."""
    run = current_checkpoint_run()
    return _NO_CHECKPOINT if run is None else run.waiting()


@final
class CalleeRun:
    """A function that a peer calls under a checkpoint, as it runs on this worker."""

    def __init__(self, generators: Generators, draws: Draws, function: str, me: str) -> None:
        self._draws, self._function, self._me = draws, function, me
        self._recording = decoded(draws.state, function) if draws.again else Recording()
        self.run = CheckpointRun(generators, self._recording, is_recomputation=draws.again)

    def note(self, error: BaseException | None = None, *, wait: bool = True) -> bytes:
        """The function has returned or raised: the random state to send with the answer.

        Waits for calls that the function made and did not wait for: in one process they would be
        over by now. Their deadlines end before that of the function.
        """
        recording, run = self._recording, self.run
        if not self._draws.again:
            recording.raised = error is not None
            return encoded(recording, self._function, wait=wait)
        if run.end == run.begin or digest(run.end) == recording.end:
            return b""
        if error is None or recording.raised or not recording.start:
            raise UsageError(self._mismatch(), hint=_HINT) from error
        return b""  # only the recomputation raised: its error tells more than a count of draws

    def later_note(self, error: BaseException | None = None) -> bytes:
        """The same for a function that returned a future, once that is done.

        Does not wait: the thread that completes a future may be the one that reads the answers.
        """
        if not self._draws.again and self.run.generators.get_state() != self.run.end:
            raise UsageError(
                f"random numbers were drawn on {self._me} between {self._function} and the future "
                "that it returned: a checkpoint that calls it could not draw them again",
                hint=_HINT,
            )
        return self.note(error, wait=False)

    def _mismatch(self) -> str:
        text = f"{self._function} on {self._me} draws random numbers in the recomputation of a "
        if not self._draws.known:
            return (
                f"{text}checkpoint, and those of its forward are not known: its forward did not "
                "call it here, or called it from another thread than the checkpoint's, or did not "
                "wait for it before a future that depends on it was done"
            )
        if not self._recording.end:
            return f"{text}checkpoint, but drew none in its forward"
        return (
            f"{text}checkpoint, but not those of its forward: it drew a different number of them, "
            "or another function drew on the same worker meanwhile, or a device was first used "
            "then"
        )


_INTERLEAVED = (
    "the random numbers of a checkpoint's forward cannot be drawn again: another function that a "
    "checkpoint calls ran on this worker at the same time. It got no turn, because the one before "
    "it took too long, or waited for it where gradwire cannot see that (torch.futures.wait_all, an "
    "event, a thread pool)"
)
_INTERLEAVED_HINT = (
    "wait for each future with wait(), or checkpoint(preserve_rng_state=False) if it does not "
    "matter which numbers are drawn"
)
_HINT = (
    "let no other function draw there at the same time (Options(threads=1) runs one after the "
    "other), or checkpoint(preserve_rng_state=False) if it does not matter which numbers are drawn"
)


# -- torch's checkpoints

_GENERATOR = "_checkpoint_without_reentrant_generator"
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
"""the one other module of torch that imports the generator function by name"""


def _find_generators() -> Generators | None:
    worker = current_worker.maybe_find()
    return None if worker is None else cast(Generators, worker.generators)


def _wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    def watched(
        ctx: object, run_function: Callable[..., Any], preserve_rng_state: bool, *args: object
    ) -> Any:  # noqa: ANN401
        generators = _find_generators() if preserve_rng_state else None
        if generators is None:
            return forward(ctx, run_function, preserve_rng_state, *args)
        recording = Recording()

        def recorded(*args: object) -> Any:  # noqa: ANN401
            again = bool(recording.start)  # the first call is the forward
            with CheckpointRun(generators, recording, is_recomputation=again):
                return run_function(*args)

        return forward(ctx, recorded, False, *args)

    return watched


def _wrapped_generator(generator: Callable[..., Checkpoint]) -> Callable[..., Checkpoint]:
    def watched(
        fn: Callable[..., Any],
        preserve_rng_state: bool = True,
        *options_and_args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Checkpoint:
        # Without a graph nothing is recomputed.
        generators = _find_generators() if preserve_rng_state and torch.is_grad_enabled() else None
        if generators is None:
            yield from generator(fn, preserve_rng_state, *options_and_args, **kwargs)
            return
        recording = Recording()

        def again(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with CheckpointRun(generators, recording, is_recomputation=True):
                return fn(*args, **kwargs)

        with CheckpointRun(generators, recording, is_recomputation=False):
            yield from generator(again, False, *options_and_args, **kwargs)
        if len(generators.get_state()) != len(recording.start):
            raise RuntimeError(
                "PyTorch's device state was initialized in the forward pass of a Checkpoint, "
                "which is not allowed."
            )

    return lambda *args, **kwargs: begun(watched(*args, **kwargs))


def wrap_checkpoints() -> None:
    """Replace torch's two functions. Called once per process, when rpc/worker.py is imported."""
    function = _checkpoint.CheckpointFunction
    original = getattr(_checkpoint, _GENERATOR, None)
    if original is None:
        raise ImportError(
            f"torch {torch.__version__} lacks torch.utils.checkpoint.{_GENERATOR}; gradwire needs "
            "torch 2.11 or newer"
        )
    watched = _wrapped_generator(original)
    for module in (_checkpoint, sys.modules.get(_COMPOSABLE)):
        if module is not None and getattr(module, _GENERATOR, None) is original:
            setattr(module, _GENERATOR, watched)
    function.forward = staticmethod(_wrapped_forward(function.forward))  # type: ignore[method-assign]
