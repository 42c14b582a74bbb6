"""Parameters whose old values outlive a step, for the graphs that still need them.

A graph keeps what its backward needs. Of a leaf torch keeps the very tensor, and compares versions
when the backward comes, so that one trainer's step in place fails every other trainer's backward.
Here a step writes nothing: it gives the parameter new storage. Around all code in a context stand
hooks that make a graph keep the storage it has used rather than the parameter:

    a parameter, or a view of one   its storage of that moment, and which generation that was
    anything else                   itself, and its version

Hooks switch torch's own check off, so ours is made when a graph asks for a tensor back: whoever
writes into what a backward needs is told, as ever. A graph that was made without the hooks, outside
of any context, still keeps the parameter itself: if there is one, a step moves the parameter's
version, and that graph fails rather than be wrong.

Note [Between keeping and computing]: an operator keeps its inputs first and reads them afterwards,
without the interpreter's lock. A step in between would have it keep the old weights and use the new
ones. So a thread that has kept a parameter is noted, with the instruction it is at; a step waits
until it has gone on. It waits for an operator, never for user code. Nor may the version move while
an operator's inputs are being kept: torch would take it for a write of the hook's. It moves only
for a parameter that something besides operators holds.

Note [Storage that a step has left]: `p.detach()`, a view or an entry of `state_dict()` older than a
step still has the old storage, and shares a version counter with the parameter, which has a new
storage by now. So a later version says nothing about the old storage: either may have been written.
If anything but graphs holds the old storage when a step leaves it, the graphs get a copy of their
own, and later writes do not reach them. After the step, the old storage can be reached through one
of those holders only. One that holds it for a moment, such as an operator in another thread, costs
a copy and does no harm.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NamedTuple, final

import torch

from gradwire.optim.torch_private import holders_of, is_over, kept_by_graphs, same_over

_POLL_SECONDS = 0.0002
_OPERATOR_SECONDS = 5.0
"""An operator that takes longer has read its inputs long ago."""
_POLLS_OF_GRAPHS = 5000
"""What holds a parameter each time we look is no operator but a graph."""


@final
class _Generation:
    """One storage of a parameter. `last`: the version at which it was left; None while in use."""

    __slots__ = ("_kept", "copies", "last")

    def __init__(self) -> None:
        self.last: int | None = None
        self._kept: dict[int, weakref.ref[torch.Tensor]] = {}
        self.copies: dict[int, torch.Tensor] = {}
        """once it is left: what graphs get in the place of what they keep, by identity"""

    def keep(self, tensor: torch.Tensor) -> None:
        """A graph keeps this one. hot: for each parameter that an operator saves"""
        number, kept = id(tensor), self._kept
        kept[number] = weakref.ref(tensor, lambda _: kept.pop(number, None))

    def kept(self) -> list[torch.Tensor]:
        """Those that graphs keep still."""
        alive = [reference() for reference in list(self._kept.values())]
        return [tensor for tensor in alive if tensor is not None]


@final
class _Entry:
    """A parameter that is stepped here. `before` keeps the storage that the last step has left:

    an operator that saves nothing may still read it. A generation that no graph keeps is None.
    """

    __slots__ = ("before", "generation", "is_strided", "parameter", "stand_ins")

    def __init__(self, parameter: weakref.ref[torch.Tensor], is_strided: bool) -> None:
        self.parameter, self.is_strided = parameter, is_strided
        self.generation: _Generation | None = None
        self.before: object = None
        self.stand_ins: dict[int, weakref.ref[torch.Tensor]] = {}
        """of all optimizers that step it: they may share its storage, and never write there"""

    def shares_with(self, stand_in: torch.Tensor) -> None:
        """From this step on."""
        number, known = id(stand_in), self.stand_ins
        if number not in known:
            known[number] = weakref.ref(stand_in, lambda _: known.pop(number, None))


_Saved = tuple[torch.Tensor, int, _Generation | None]
"""What a graph keeps in the place of a tensor: its storage, its version, its generation."""


class _Spot(NamedTuple):
    """Where a thread was when it kept parameters. Held until it leaves the hooks, at most.

    Not asked of `sys._current_frames`: two threads that do so can block each other for good.
    """

    frame: FrameType
    instruction: int
    parameters: frozenset[int]

    @property
    def is_left(self) -> bool:
        """Whether the thread has gone on."""
        return self.frame.f_lasti != self.instruction


@final
class _HookedBlock:
    """A block under the hooks. hot: around all that is served in a context"""

    __slots__ = ("_hooks", "_thread", "_versions")

    def __init__(self, versions: WeightVersions, hooks: AbstractContextManager[None]) -> None:
        self._versions, self._hooks = versions, hooks

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._versions.entered(self._thread)
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        try:
            self._hooks.__exit__(None, None, None)
        finally:
            self._versions.left(self._thread)


_NOTHING: AbstractContextManager[None] = nullcontext()


@final
class WeightVersions:
    """The parameters of one worker that optimizers step."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._entries: dict[int, _Entry] = {}
        self._spots: dict[int, _Spot] = {}
        self._under_hooks: dict[int, int] = {}
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def register(self, parameters: Iterable[torch.Tensor]) -> None:
        """From now on graphs keep these by their storage."""
        with self._lock:
            for parameter in parameters:
                entry = self._entries.get(id(parameter))
                if entry is None or entry.parameter() is not parameter:
                    is_strided = parameter.layout == torch.strided
                    self._entries[id(parameter)] = _Entry(self._watch(parameter), is_strided)

    def _watch(self, parameter: torch.Tensor) -> weakref.ref[torch.Tensor]:
        key, entries = id(parameter), self._entries

        def gone(dead: weakref.ref[torch.Tensor]) -> None:
            if (entry := entries.get(key)) is not None and entry.parameter is dead:
                del entries[key]

        return weakref.ref(parameter, gone)

    def hooks(self) -> AbstractContextManager[None]:
        """The hooks, around code that makes graphs."""
        return _HookedBlock(self, self._hooks) if self._entries else _NOTHING

    def entered(self, thread: int) -> None:
        """A thread comes under the hooks."""
        with self._lock:
            self._under_hooks[thread] = self._under_hooks.get(thread, 0) + 1

    def left(self, thread: int) -> None:
        """It leaves them, once for each time it came."""
        with self._lock:
            self._spots.pop(thread, None)
            left = self._under_hooks.pop(thread) - 1
            if left:
                self._under_hooks[thread] = left

    def replace(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Give each parameter the storage of its stand-in; those pairs that still have two.

        One that shares its storage with something else is written in place, as others look there.
        """
        apart = []
        with self._lock:
            kept = self._wait_for_operators([parameter for parameter, _ in pairs])
            for parameter, stand_in in pairs:
                entry = self._entries[id(parameter)]
                own: Any = parameter.untyped_storage() if entry.is_strided else parameter.data
                if entry.is_strided and _is_looked_at(own, parameter):
                    parameter.copy_(stand_in)
                    apart.append((parameter, stand_in))
                    continue
                entry.before = own
                parameter.data = stand_in
                entry.shares_with(stand_in)
                if entry.generation is not None:
                    _leave(entry, own, parameter)
                if kept and parameter in kept:
                    torch.autograd.graph.increment_version(parameter)
        return apart

    def _is_alone(self) -> bool:
        return not self._under_hooks.keys() - {threading.get_ident()}

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        """Called for every tensor a graph keeps; hot."""
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:
            with self._lock:
                entry = self._maybe_entry(base)
                if entry is not None:
                    if base is tensor:  # a view has the storage it will read already
                        self._note(sys._getframe(1), id(tensor))
                    if entry.generation is None:
                        entry.generation = _Generation()
                    stored = tensor.detach()
                    entry.generation.keep(stored)
                    return stored, tensor._version, entry.generation
        # The output of a node would hold that node, which holds us.
        kept = tensor if tensor.is_leaf else tensor.detach()
        return kept, tensor._version, None

    def _maybe_entry(self, leaf: torch.Tensor) -> _Entry | None:
        """The parameter that a leaf is, or stands for: what a graph gets back is not the same."""
        entry = self._entries.get(id(leaf))
        if entry is not None and entry.parameter() is leaf:
            return entry
        node: Any = torch.autograd.graph.get_gradient_edge(leaf).node
        variable: torch.Tensor = node.variable
        entry = self._entries.get(id(variable))
        if entry is None or entry.parameter() is not variable:
            return None
        return entry if variable.data_ptr() == leaf.data_ptr() else None

    def _note(self, frame: FrameType, parameter: int) -> None:
        thread = threading.get_ident()
        spot = self._spots.get(thread)
        is_same = spot is not None and spot.frame is frame and not spot.is_left
        more = spot.parameters if spot is not None and is_same else frozenset()
        self._spots[thread] = _Spot(frame, frame.f_lasti, more | {parameter})

    def _wait_for_operators(self, parameters: list[torch.Tensor]) -> set[torch.Tensor]:
        """See Note [Between keeping and computing]. Those that graphs without hooks may keep."""
        kept = parameters
        for polled in range(int(_OPERATOR_SECONDS / _POLL_SECONDS)):
            self._forget_those_who_went_on()
            is_read = bool(self._spots) and self._are_read(parameters)
            kept = kept_by_graphs(kept)
            look_again = kept and polled < _POLLS_OF_GRAPHS and not self._is_alone()
            if not is_read and not look_again:
                break
            self._changed.wait(_POLL_SECONDS)
        return set(kept)

    def _are_read(self, parameters: list[torch.Tensor]) -> bool:
        names = {*map(id, parameters)}
        return any(spot.parameters & names for spot in self._spots.values())

    def _forget_those_who_went_on(self) -> None:
        for thread, spot in list(self._spots.items()):
            if spot.is_left:
                del self._spots[thread]


def _unpack(saved: _Saved) -> torch.Tensor:
    tensor, version, generation = saved
    now = tensor._version  # first: a step on another thread says `last` before it moves this
    last = None if generation is None else generation.last
    now = now if last is None else last
    if now != version:
        kind = f"{tensor.type()} {list(tensor.shape)}"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{kind}] is at version {now}; expected version {version} instead."
        )
    if generation is None or last is None:
        return tensor
    # What was left has no version in common with the parameter any more.
    copy = generation.copies.get(id(tensor))
    return (tensor if copy is None else copy).data


def _leave(entry: _Entry, own: Any, parameter: torch.Tensor) -> None:  # noqa: ANN401
    """The parameter has another storage. See Note [Storage that a step has left]."""
    generation, entry.generation = entry.generation, None
    assert generation is not None
    if kept := generation.kept():
        try:
            generation.copies = _copies(entry, own, kept)
        except RuntimeError:  # no memory: versions are still compared, and any write is an error
            return
    # Read after the copies were made: a write that came in between fails the graphs.
    generation.last = parameter._version


def _copies(
    entry: _Entry,
    own: Any,  # noqa: ANN401
    kept: Sequence[torch.Tensor],
) -> dict[int, torch.Tensor]:
    """The same tensors over memory of their own, by identity, where others may write to theirs."""
    if not entry.is_strided:
        return {id(tensor): tensor.clone() for tensor in kept}
    stand_ins = [reference() for reference in list(entry.stand_ins.values())]
    known = [
        tensor for tensor in (*kept, *stand_ins) if tensor is not None and is_over(own, tensor)
    ]
    is_held = holders_of(own) > len(known) + 1  # and `own`
    copied: dict[torch.UntypedStorage, torch.UntypedStorage] = {}
    copies = {}
    for tensor in kept:
        if is_over(own, tensor) and not is_held:
            continue  # a view from before an earlier step is on a storage that was left already
        storage = tensor.untyped_storage()
        if storage not in copied:
            copied[storage] = storage.clone()  # type: ignore[no-untyped-call]
        copies[id(tensor)] = same_over(copied[storage], tensor)
    return copies


def _is_looked_at(storage: torch.UntypedStorage, parameter: torch.Tensor) -> bool:
    """Whether others than the parameter find their values in its storage."""
    return storage.nbytes() != parameter.nbytes or storage.is_shared()
