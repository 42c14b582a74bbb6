"""How a worker behaves where gradwire's own API and torch's differ; compat has another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.agent.peers.directory import Directory
from gradwire.transport.base import Channel

Translated = Callable[[Exception, Directory], Exception]


def as_it_is(error: Exception, _: Directory) -> Exception:
    """Our own errors are raised as they are."""
    return error


def just_so(channel: Channel) -> Channel:
    """Our channels do what they are told."""
    return channel


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """The defaults are ours."""

    pickle: bool = False
    """functions, arguments and results travel as pickles, their tensors beside them"""
    reducers: Mapping[type, Callable[[Any], Any]] = field(default_factory=dict)
    """how to pickle values of a type, as in `copyreg`"""
    edge_per_message: bool = False
    """the tensors of one message cross together, by one edge, instead of each by its own"""
    leaves_outside_contexts: bool = False
    """a tensor that wants a gradient still does so after a crossing that nothing records"""
    carries_modes: bool = True
    """the caller's grad mode and inference mode hold for the function it calls; without it, that
    runs as on a fresh thread, and a caller that does not record gets a result without a graph"""
    counts_before_use: bool = False
    """a function runs once the owners of all references in its arguments have counted them"""
    answers_when_made: bool = False
    """`remote` is answered when the value is made, not when its making has begun"""
    runs_what_is_late: bool = False
    """a function runs though nobody waits for it any more: its callee does not hear of that"""
    reference: type[Any] | None = None
    """a subclass of RRef, of which references are made"""
    of_call: Translated = as_it_is
    """the error that a failed call raises"""
    of_fetch: Translated = as_it_is
    """the error that fetching a value raises"""
    of_callback: Callable[[Exception], Exception] = lambda error: error
    """what waits for a callback of a future gets instead of what it raised"""
    channel: Callable[[Channel], Channel] = just_so
    """what stands between this worker and each of its channels"""


NATIVE = Behavior()
