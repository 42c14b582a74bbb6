"""Names in a profile: ranges that torch's profiler shows; without one they cost next to nothing.

A profiler sees the thread that started it. What peers ask of a worker runs on gradwire's threads;
to see that too, give it `experimental_config=_ExperimentalConfig(profile_all_threads=True)`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.profiler import record_function

from gradwire.torch_private import is_profiled

NOTHING: AbstractContextManager[Any] = nullcontext()


def span(form: str, *parts: object) -> AbstractContextManager[Any]:
    """The block under a name, which is put together only if a profiler runs."""
    return record_function(form % parts) if is_profiled() else NOTHING
