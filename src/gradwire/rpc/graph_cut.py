"""GraphCutWarning: warns, at the user's line, that a tensor crossed without its graph."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

from gradwire.errors import GraphCutWarning

# Each ends with a separator: a program in a folder gradwire_app is the user's.
_LIBRARIES = tuple(
    f"{Path(package).parent}{os.sep}" for package in (Path(__file__).parent, torch.__file__)
)


def warn_of_cut(count: int, what: str, copies: int = 0) -> None:
    """Warn that tensors that require grad lost their graph when they crossed.

    `count` of them crossed outside of any context, and `copies` in one, but inside objects.
    """
    if count:
        _warn(
            f"{_tensors(count)} crossed in {what} outside of any open context: no gradient will "
            "come back\n"
            "hint: make the call inside `with gradwire.context():`, detach() the tensor, or use "
            "no_grad; a thread enters the context with contextvars.copy_context().run(...)"
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
    warnings.warn(text, GraphCutWarning, stacklevel=_user_level())


def _user_level() -> int:
    """How many frames above _warn the user's code is.

    Torch's frames are skipped too: a module is called through `Module.__call__`, and Python shows a
    warning once for each line, so all modules of a program would share one warning.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level
