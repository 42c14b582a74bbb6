"""Behavior: how a worker behaves where gradwire's own API and torch's differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.agent.peers.directory import Directory

Translated = Callable[[Exception, Directory], Exception]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """The differences as options. The defaults are native; gradwire.compat sets torch's."""

    pickle: bool = False
    """functions, arguments and results are pickled; tensors are sent beside the pickle"""
    reducers: Mapping[type, Callable[[Any], Any]] = field(default_factory=dict)
    """how to pickle values of a type, as in `copyreg`"""
    edge_per_message: bool = False
    """the tensors of one message share one edge, instead of one each"""
    leaves_outside_contexts: bool = False
    """a tensor that requires grad still does after it was sent outside of a context"""
    carries_modes: bool = True
    """the function runs in the caller's grad and inference modes; otherwise in default modes,
    and a caller with grad mode off gets a result without a graph
    """
    needs_device_map: bool = False
    """a tensor on a device can be sent only if a device map says where it arrives"""
    counts_before_use: bool = False
    """a function runs only after the owners have counted all references in its arguments"""
    answers_when_made: bool = False
    """`remote` is answered when the function has returned, not when it begins"""
    runs_what_is_late: bool = False
    """the callee is not told of cancellations, so a function runs though nobody waits for it"""
    reference: type[Any] | None = None
    """the class of references, a subclass of RRef"""
    of_call: Translated = lambda error, _: error
    """the error that a failed call raises"""
    of_fetch: Translated = lambda error, _: error
    """the error that fetching a value raises"""
    of_callback: Callable[[Exception], Exception] = lambda error: error
    """the error that the future of a callback raises, for what the callback raised"""
    profiled_call: Callable[..., Any] | None = None
    """makes the calls of a thread that is profiled"""
    parts: tuple[Callable[[Any], object], ...] = ()
    """`worker.part(…)` of each is made before the worker serves"""


NATIVE = Behavior()
