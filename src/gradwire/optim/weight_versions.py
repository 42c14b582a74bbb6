"""WeightVersions: keeps the old values of parameters for the graphs that still need them.

A graph saves the tensors that its backward needs. Of a leaf torch saves the tensor itself, and
compares versions in backward, so one trainer's step in place makes the backward of every other
trainer fail. Here a step writes nothing: it gives the parameter a new storage. Saved-tensor hooks
around functions that peers call, engine runs for them and all code in a context make a graph save
the storage that it has used:

    a parameter, or a view of one   its current storage, and the generation of that storage
    anything else                   itself, and its version

The hooks turn torch's version check off, so `_unpack` repeats it. A graph made without the hooks,
by the program itself outside of any context, still saves the parameter: if there is one, a step
increments the parameter's version, so that the backward of that graph fails, as after a step of
torch's. A step while such a backward runs is a race, as in torch.

Note [Between saving and computing]: an operator saves its inputs first and reads them afterwards,
without the GIL. A step in between would make it save the old weights and use the new ones. So the
hook notes the thread that saved a parameter and the instruction that it is at, and a step waits
until the thread has moved on. It waits for an operator, never for user code: torch tells nobody
that an operator has read its inputs, so the frame of its caller is polled. A loop that is seen at
the same instruction again costs at most `_OPERATOR_SECONDS`, and an operator reads a pointer to its
inputs long before.

Nor may the version change while the hook saves an operator's inputs: torch would take it for a
write by the hook, and raise. It changes only for a parameter that something else than an operator
holds, which the reference count tells: an operator lets go of it within `_POLLS_OF_GRAPHS` polls.
A count that is too high costs that time, and an error of torch's if an operator holds on longer. If
no other thread is under the hooks, references are counted after the parameter has got its storage,
and so include those of an operator that began meanwhile.

Note [Storage that a step has left]: `p.detach()`, a view or an entry of `state_dict()` from before
a step still uses the old storage, but shares a version counter with the parameter, which has a new
storage. So a later version says nothing about the old storage: either may have been written. If
anything but graphs holds the old storage when a step replaces it, the graphs get a copy of their
own, which later writes do not reach. A holder of a moment, such as an operator in another thread,
costs a copy and does no harm.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, cast, final

import torch

from gradwire.optim.step import Pairs
from gradwire.torch_private import accumulator_of, holders_of, is_over, same_over, use_count

_POLL_SECONDS = 0.0002
_OPERATOR_SECONDS = 5.0
"""After this time an operator has certainly read its inputs."""
_POLLS_OF_GRAPHS = 5000
"""A parameter that is held at each of so many polls is held by a graph, not by an operator."""

_ById = dict[int, weakref.ref[torch.Tensor]]


@final
@dataclass(slots=True, eq=False)
class _Generation:
    """One storage of a parameter."""

    last: int | None = None
    """the parameter's version when a step replaced this storage, None before"""
    kept: _ById = field(default_factory=dict)
    """the tensors that graphs saved"""
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    """set when it is replaced: what graphs get for the tensors that they saved, by id"""


@final
@dataclass(slots=True, eq=False)
class _Entry:
    """A parameter that is stepped here."""

    parameter: weakref.ref[torch.Tensor]
    is_strided: bool
    generation: _Generation | None = None
    """None until a graph saves the parameter"""
    before: object = None
    """the storage that the last step replaced: an operator that saves nothing may still read it"""
    stand_ins: _ById = field(default_factory=dict)
    """of all optimizers that step it: they may share its storage, but never write to it"""


@final
class Registration:
    """What an optimizer keeps while it steps parameters: the nodes that add to their gradients.

    So each parameter has two references of its own, and a third is that of a graph or an operator.
    The nodes hold the parameters, so WeightVersions must not keep them itself.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self.renew()

    def renew(self) -> None:
        """Keep the nodes of now: torch makes new ones after a change of dtype or device."""
        self._nodes = [*map(accumulator_of, self._parameters)]
        self.is_complete = None not in self._nodes  # one that requires no gradient has no node


def _note(known: _ById, tensor: torch.Tensor) -> None:
    """Note a tensor by its id, as long as it lives. hot: for each parameter that is saved"""
    number = id(tensor)
    known[number] = weakref.ref(tensor, lambda _: known.pop(number, None))


def _alive(known: _ById) -> list[torch.Tensor]:
    alive = [reference() for reference in list(known.values())]
    return [tensor for tensor in alive if tensor is not None]


_Saved = tuple[torch.Tensor, int, _Generation | None]
"""What a graph saves for a tensor: a tensor on its storage, its version, its generation."""


class _Spot(NamedTuple):
    """Where a thread was when it saved parameters. Kept until it leaves the hooks, at most.

    Not read from `sys._current_frames`: two threads that call it can deadlock.
    """

    frame: FrameType
    instruction: int
    parameters: frozenset[int]


@final
class _HookedBlock:
    """A block with the hooks. hot: around every request served in a context"""

    __slots__ = ("_hooks", "_thread", "_versions")

    def __init__(self, versions: WeightVersions, hooks: AbstractContextManager[None]) -> None:
        self._versions, self._hooks = versions, hooks

    def __enter__(self) -> None:
        self._thread = thread = threading.get_ident()
        versions = self._versions
        with versions._lock:
            versions._under_hooks[thread] = versions._under_hooks.get(thread, 0) + 1
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        versions, thread = self._versions, self._thread
        try:
            self._hooks.__exit__(None, None, None)
        finally:
            with versions._lock:
                versions._spots.pop(thread, None)
                left = versions._under_hooks.pop(thread) - 1
                if left:
                    versions._under_hooks[thread] = left


_NOTHING: AbstractContextManager[None] = nullcontext()


@final
class WeightVersions:
    """The storages of the parameters of one worker that optimizers step."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._entries: dict[int, _Entry] = {}
        self._spots: dict[int, _Spot] = {}
        self._under_hooks: dict[int, int] = {}
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def register(self, parameters: Iterable[torch.Tensor]) -> Registration:
        """Let graphs save these parameters by their storage from now on."""
        entries = self._entries
        with self._lock:
            for parameter in parameters:
                key = id(parameter)
                if key not in entries or entries[key].parameter() is not parameter:
                    alive = weakref.ref(parameter, lambda _, key=key: entries.pop(key, None))  # type: ignore[misc]
                    entries[key] = _Entry(alive, parameter.layout == torch.strided)
        return Registration(parameters)

    def hooks(self) -> AbstractContextManager[None]:
        """A block with the hooks, for code that makes graphs."""
        return _HookedBlock(self, self._hooks) if self._entries else _NOTHING

    def replace(self, pairs: Pairs, registration: Registration | None = None) -> Pairs:
        """Give each parameter the storage of its stand-in; returns pairs that still share none."""
        apart, replaced = [], []
        with self._lock:
            kept = self._wait_for_operators([parameter for parameter, _ in pairs], registration)
            for parameter, stand_in in pairs:
                entry = self._entries[id(parameter)]
                own: Any = parameter.untyped_storage() if entry.is_strided else parameter.data
                # Shared with other tensors or processes, which must see the new values.
                if entry.is_strided and (own.nbytes() != parameter.nbytes or own.is_shared()):
                    parameter.copy_(stand_in)
                    apart.append((parameter, stand_in))
                    continue
                entry.before = own
                parameter.data = stand_in
                if id(stand_in) not in entry.stand_ins:
                    _note(entry.stand_ins, stand_in)
                replaced.append(parameter)
                if entry.generation is not None:
                    _leave(entry, own, parameter)
            held = _held(replaced, registration) if kept is None else kept.intersection(replaced)
            for parameter in held:
                torch.autograd.graph.increment_version(parameter)
        return apart

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        """What to save for a tensor. hot: every tensor that a graph saves"""
        base = tensor if tensor._base is None else tensor._base
        # A parameter may be stepped later that requires no gradient now.
        if base.is_leaf and (base.requires_grad or id(base) in self._entries):
            with self._lock:
                entry = self._maybe_entry(base)
                if entry is not None:
                    # A view, or what a graph unpacked, already has the storage that is read next.
                    if entry.parameter() is tensor:
                        self._note_spot(sys._getframe().f_back, id(tensor))
                    if entry.generation is None:
                        entry.generation = _Generation()
                    stored = tensor.detach()
                    _note(entry.generation.kept, stored)
                    return stored, tensor._version, entry.generation
        # An output saved as it is would hold its node, which holds the saved tensor: a cycle.
        kept = tensor if tensor.is_leaf else tensor.detach()
        return kept, tensor._version, None

    def _maybe_entry(self, leaf: torch.Tensor) -> _Entry | None:
        """The entry of a parameter, or of what a graph unpacked for it and saves again."""
        entry = self._entries.get(id(leaf))
        if entry is not None and entry.parameter() is leaf:
            return entry
        if not leaf.requires_grad:
            return None
        node: Any = torch.autograd.graph.get_gradient_edge(leaf).node
        variable: torch.Tensor = node.variable
        entry = self._entries.get(id(variable))
        if entry is None or entry.parameter() is not variable:
            return None
        return entry if variable.data_ptr() == leaf.data_ptr() else None

    def _note_spot(self, frame: FrameType | None, parameter: int) -> None:
        if frame is None:  # a thread of the engine, which runs a graph made without the hooks
            return
        thread = threading.get_ident()
        old = self._spots.get(thread)
        more = old.parameters if old and old[:2] == (frame, frame.f_lasti) else frozenset()
        self._spots[thread] = _Spot(frame, frame.f_lasti, more | {parameter})

    def _wait_for_operators(
        self, parameters: list[torch.Tensor], registration: Registration | None
    ) -> set[torch.Tensor] | None:
        """See Note [Between saving and computing]. Returns those held without the hooks.

        None if no other thread is under the hooks: then the caller can still count references.
        """
        kept, others, me = parameters, set[int](), threading.get_ident()
        for polled in range(int(_OPERATOR_SECONDS / _POLL_SECONDS)):
            for thread, spot in list(self._spots.items()):
                if spot.frame.f_lasti != spot.instruction:  # the thread has moved on
                    del self._spots[thread]
            spots = self._spots.values()
            is_read = any(not spot.parameters.isdisjoint(map(id, parameters)) for spot in spots)
            others = self._under_hooks.keys() - {me}
            kept = _held(kept, registration) if others else kept
            look_again = others and kept and polled < _POLLS_OF_GRAPHS
            if not is_read and not look_again:
                break
            self._changed.wait(_POLL_SECONDS)
        return {*kept} if others else None


def _held(parameters: list[torch.Tensor], registration: Registration | None) -> list[torch.Tensor]:
    """Those that a graph holds itself, or an operator that is running. hot: each step"""
    # Two references are harmless: the Python object's, and that of the node that adds the gradient.
    if registration is not None and registration.is_complete:
        if max(map(use_count, parameters), default=0) <= 2:
            return []
        registration.renew()  # the third may be a node that is used no more
    return [each for each in parameters if use_count(each) > 1 and _is_held_by_others(each)]


def _is_held_by_others(leaf: torch.Tensor) -> bool:
    # A leaf that requires no gradient has no node, so its second reference counts.
    if use_count(leaf) > 2 or not leaf.requires_grad:
        return True
    # The node dies with the last graph that leads to it, and a graph made while the leaf required
    # no gradient has none. So it is made, if it is not there: then a graph's reference is a third.
    _node = accumulator_of(leaf)
    return use_count(leaf) > 2


def _unpack(saved: _Saved) -> torch.Tensor:
    tensor, version, generation = saved
    now = tensor._version  # first: a step in another thread sets `last` before it increments this
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
    # A replaced storage no longer shares the parameter's version: .data has one of its own.
    copy = generation.copies.get(id(tensor))
    return (tensor if copy is None else copy).data


def kept_in(saved: object, unpack: object) -> object:
    """What a graph keeps of a tensor that it saved under these hooks, or `saved` if it did not."""
    return cast(_Saved, saved)[0] if unpack is _unpack else saved


def _leave(entry: _Entry, own: Any, parameter: torch.Tensor) -> None:  # noqa: ANN401
    """End the generation of the old storage. See Note [Storage that a step has left]."""
    generation, entry.generation = entry.generation, None
    assert generation is not None
    if kept := _alive(generation.kept):
        try:
            generation.copies = _copies(entry, own, kept)
        except RuntimeError:  # out of memory: versions are still compared, so any write is an error
            return
    # Read after copying, so that a write in between makes the graphs fail.
    generation.last = parameter._version


def _copies(entry: _Entry, own: Any, kept: list[torch.Tensor]) -> dict[int, torch.Tensor]:  # noqa: ANN401
    """Copies of the saved tensors whose storage something else may write to, by id."""
    if not entry.is_strided:
        return {id(tensor): tensor.clone() for tensor in kept}
    known = [tensor for tensor in (*kept, *_alive(entry.stand_ins)) if is_over(own, tensor)]
    is_held = holders_of(own) > len(known) + 1  # and `own`
    copied: dict[torch.UntypedStorage, torch.UntypedStorage] = {}
    copies = {}
    for tensor in kept:
        if is_over(own, tensor) and not is_held:
            continue  # unlike a view from before an earlier step, whose storage was replaced
        storage = tensor.untyped_storage()
        if storage not in copied:
            copied[storage] = storage.clone()  # type: ignore[no-untyped-call]
        copies[id(tensor)] = same_over(copied[storage], tensor)
    return copies
