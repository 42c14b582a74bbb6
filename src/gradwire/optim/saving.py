"""Parameters whose old values outlive a step, for the graphs that still need them.

A graph keeps what its backward needs. Of a leaf torch keeps the very tensor, and compares versions
when the backward comes, so that one trainer's step in place fails every other trainer's backward.
Here a step writes nothing: it gives the parameter new storage. Around all code in a context stand
hooks that make a graph keep the storage it has used rather than the parameter:

    a parameter, or a view of one   its storage of that moment, and which generation that was
    anything else                   itself, and its version

Hooks switch torch's own check off, so ours is made when a graph asks for a tensor back: whoever
writes into what a backward needs is told, as ever. A step moves the parameter's version too: a
graph that was made without the hooks fails rather than be wrong.

Note [Between keeping and computing]: an operator keeps its inputs first and reads them afterwards,
without the interpreter's lock. A step in between would have it keep the old weights and use the new
ones. So a thread that has kept a parameter is noted, with the instruction it is at; a step waits
until it has gone on. It waits for an operator, never for user code.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import NamedTuple, final

import torch

_POLL_SECONDS = 0.0002
_OPERATOR_SECONDS = 30.0
"""An operator that takes longer has read its inputs long ago."""
_FRAMES_OF_A_HOOK = 2  # _pack, and its lock


@final
class _Generation:
    """One storage of a parameter. `last`: the version at which it was left; None while in use."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: int | None = None


@final
class _Entry:
    """A parameter that is stepped here. `before` keeps the storage that the last step has left:

    an operator that saves nothing may still read it.
    """

    __slots__ = ("before", "generation", "parameter")

    def __init__(self, parameter: weakref.ref[torch.Tensor]) -> None:
        self.parameter = parameter
        self.generation = _Generation()
        self.before: torch.Tensor | None = None


class _Saved(NamedTuple):
    """What a graph keeps in the place of a tensor."""

    tensor: torch.Tensor
    version: int
    generation: _Generation | None


class _Spot(NamedTuple):
    """Where a thread was when it kept parameters: a frame and the instruction in it."""

    frame: int
    instruction: int
    parameters: frozenset[int]


@final
class Storages:
    """The parameters of one worker that optimizers step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}
        self._spots: dict[int, _Spot] = {}

    def register(self, parameters: Iterable[torch.Tensor]) -> None:
        """From now on graphs keep these by their storage."""
        with self._changed:
            for parameter in parameters:
                entry = self._entries.get(id(parameter))
                if entry is None or entry.parameter() is not parameter:
                    self._entries[id(parameter)] = _Entry(self._watch(parameter))

    def _watch(self, parameter: torch.Tensor) -> weakref.ref[torch.Tensor]:
        key, entries = id(parameter), self._entries

        def gone(dead: weakref.ref[torch.Tensor]) -> None:
            if (entry := entries.get(key)) is not None and entry.parameter is dead:
                del entries[key]

        return weakref.ref(parameter, gone)

    def saving(self) -> AbstractContextManager[object]:
        """The hooks, to be entered around code that makes graphs."""
        if not self._entries:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def replace(self, updates: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give each parameter its new values.

        One that shares its storage with something else is written in place, as others look there.
        """
        updates = list(updates)
        kept = frozenset(id(parameter) for parameter, _ in updates)
        with self._changed:
            self._wait_for_operators(kept)
            for parameter, new in updates:
                entry = self._entries[id(parameter)]
                if not _has_storage_of_its_own(parameter):
                    parameter.copy_(new)
                    continue
                entry.generation.last = parameter._version
                entry.generation = _Generation()
                entry.before = parameter.data
                parameter.data = new
                torch.autograd.graph.increment_version(parameter)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        """Called for every tensor a graph keeps; hot."""
        base = tensor._base if tensor._is_view() else tensor
        entry = self._entries.get(id(base))
        if entry is None or entry.parameter() is not base:
            # The output of a node would hold that node, which holds us.
            kept = tensor if tensor.is_leaf else tensor.detach()
            return _Saved(kept, tensor._version, None)
        with self._changed:
            if base is tensor:  # a view has the storage it will read already
                self._note(sys._getframe(1), id(tensor))
            return _Saved(tensor.detach(), tensor._version, entry.generation)

    def _note(self, frame: FrameType, parameter: int) -> None:
        thread = threading.get_ident()
        at = (id(frame), frame.f_lasti)
        spot = self._spots.get(thread)
        here = spot.parameters if spot is not None and spot[:2] == at else frozenset[int]()
        self._spots[thread] = _Spot(*at, here | {parameter})

    def _wait_for_operators(self, parameters: frozenset[int]) -> None:
        """See Note [Between keeping and computing]."""
        waits = int(_OPERATOR_SECONDS / _POLL_SECONDS)
        while self._spots and waits:
            frames = sys._current_frames()
            for thread, spot in list(self._spots.items()):
                if not _is_there(frames.get(thread), spot):
                    del self._spots[thread]
            del frames
            if not any(spot.parameters & parameters for spot in self._spots.values()):
                return
            self._changed.wait(_POLL_SECONDS)
            waits -= 1


def _is_there(frame: FrameType | None, spot: _Spot) -> bool:
    """Whether a thread is still at that instruction, perhaps in our own hook above it."""
    for _ in range(_FRAMES_OF_A_HOOK + 1):
        if frame is None:
            return False
        if (id(frame), frame.f_lasti) == spot[:2]:
            return True
        frame = frame.f_back
    return False


def _unpack(saved: _Saved) -> torch.Tensor:
    last = None if saved.generation is None else saved.generation.last
    now = saved.tensor._version if last is None else last
    if now != saved.version:
        kind = f"{saved.tensor.type()} {list(saved.tensor.shape)}"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{kind}] is at version {now}; expected version {saved.version} instead."
        )
    return saved.tensor


def _has_storage_of_its_own(parameter: torch.Tensor) -> bool:
    if parameter.layout != torch.strided:
        return True
    storage = parameter.untyped_storage()
    own = parameter.numel() * parameter.element_size()
    return storage.nbytes() == own and not storage.is_shared()
