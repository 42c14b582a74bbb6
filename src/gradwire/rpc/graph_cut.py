"""GraphCutWarning: warns, at the user's line, that a tensor crossed without its graph."""

from __future__ import annotations

import sys
import warnings

from gradwire.current import user_level
from gradwire.errors import GraphCutWarning


def warn_of_cut(count: int, what: str, copies: int = 0) -> None:
    """Warn that tensors that require grad lost their graph when they crossed.

    `count` of them crossed outside of any context, where torch's API records nothing, and `copies`
    inside objects.
    """
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


def _tensors(count: int) -> str:
    return "a tensor that requires grad" if count == 1 else f"{count} tensors that require grad"


def _warn(text: str) -> None:
    warnings.warn(text, GraphCutWarning, stacklevel=user_level(sys._getframe()) + 1)
