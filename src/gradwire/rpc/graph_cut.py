"""GraphCutWarning: warns, at the user's line, that a tensor crossed without its graph.

Each worker remembers its latest cuts, for the picture that `gradwire.graph` draws.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from typing import final

import msgspec

from gradwire.current import current_worker, spoken_line, user_level, user_line
from gradwire.errors import GraphCutWarning
from gradwire.ids import WorkerId

_REMEMBERED = 32


class Cut(msgspec.Struct, array_like=True):
    """Tensors that lost their graph at one line of the program."""

    line: str
    what: str
    """what they crossed in, such as "the arguments of f on w1\""""
    tensors: int
    """how many of them each time"""
    source: WorkerId | None
    """the worker that they left; None if they were only serialized"""
    to: WorkerId | None
    times: int = 1


@final
class Cuts:
    """The latest cuts that one worker has seen, each line of the program once.

    Not locked: two threads that add one at once may count it once.
    """

    def __init__(self, _: object) -> None:
        self._latest: deque[Cut] = deque(maxlen=_REMEMBERED)

    def add(self, cut: Cut) -> None:
        """Remember it, or count it once more."""
        for known in tuple(self._latest):
            if (known.line, known.what) == (cut.line, cut.what):
                known.times += 1
                return
        self._latest.append(cut)

    def latest(self) -> list[Cut]:
        """All that are remembered, oldest first."""
        return list(self._latest)


def warn_of_cut(
    count: int,
    what: str,
    copies: int = 0,
    *,
    to: WorkerId | None = None,
    source: WorkerId | None = None,
) -> None:
    """Warn that tensors that require grad lost their graph when they crossed.

    `count` of them crossed outside of any context, where torch's API records nothing, and `copies`
    inside objects. They left for `to`, or came from `source`.
    """
    _remember(what, count + copies, to, source)
    if count:
        _warn(
            f"{_tensors(count)} crossed in {what} outside of any open context: no gradient will "
            "come back\n"
            "hint: make the call inside `with dist_autograd.context():`, detach() the tensor, or "
            "use no_grad; a thread enters it with contextvars.copy_context().run(...)"
        )
    if copies:
        _warn(
            f"{_tensors(copies)} crossed in {what} as a copy, inside a module or another object: "
            "no gradient will come back to the original\n"
            "hint: pass the tensors themselves as arguments, in lists, dicts or dataclasses; keep "
            "the object where it is and call it through an RRef or a RemoteModule; or use no_grad"
        )


def _remember(what: str, count: int, to: WorkerId | None, source: WorkerId | None) -> None:
    worker = current_worker.maybe_find()
    if worker is None or not count:
        return
    me: WorkerId = worker.directory.me.id
    left, arrived = (me, to) if source is None else (source, me)
    line = spoken_line(user_line())
    worker.part(Cuts).add(Cut(line, what, count, left if arrived is not None else None, arrived))


def _tensors(count: int) -> str:
    return "a tensor that requires grad" if count == 1 else f"{count} tensors that require grad"


def _warn(text: str) -> None:
    warnings.warn(text, GraphCutWarning, stacklevel=user_level(sys._getframe()) + 1)
