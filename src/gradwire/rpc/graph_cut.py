"""The warning that a graph was cut, at the user's own line."""

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


def warn_of_cut(count: int, what: str) -> None:
    """Say that `count` tensors that require grad crossed with no context to record them."""
    tensors = "a tensor that requires grad" if count == 1 else f"{count} tensors that require grad"
    warnings.warn(
        f"{tensors} crossed in {what} outside of any open context: no gradient will come back\n"
        "hint: make the call inside `with gradwire.context():`, detach() the tensor, or use "
        "no_grad; a thread enters the context with contextvars.copy_context().run(...)",
        GraphCutWarning,
        stacklevel=_user_level(),
    )


def _user_level() -> int:
    """How many frames up the user's code is, seen from warn_of_cut.

    Torch's frames are not the user's either: a module is called through its `Module.__call__`, and
    Python shows a warning once for each line, so all modules of a program would share one.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level
