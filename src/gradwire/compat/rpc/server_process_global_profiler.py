"""A profile of the functions that this worker runs for others, whichever threads run them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from gradwire.compat.profiler_legacy import profile
from gradwire.compat.profiles.calls import run_profiled
from gradwire.compat.profiles.recording import Wishes
from gradwire.compat.profiles.served import ServedProfiles, run_recorded
from gradwire.current import current_worker

__all__: list[str] = []


class _server_process_global_profile(profile):  # torch's name
    """Records what this worker runs for others, on all threads, while it is entered.

    `process_global_function_events` has the events of each call, `function_events` all of them.
    """

    def __enter__(self) -> _server_process_global_profile | None:
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        wishes = Wishes(self.record_shapes, self.profile_memory, self.with_flops)
        _served().open(self, wishes, _run)
        return self

    def __exit__(self, *_: object) -> bool | None:
        if not self.enabled:
            return None
        self.process_global_function_events = _served().close(self)
        self._take([*chain.from_iterable(self.process_global_function_events)])
        return False


def _served() -> ServedProfiles:
    return current_worker.find().part(ServedProfiles)  # type: ignore[no-any-return]


def _run(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    if function is run_profiled:  # which records for these profiles too
        return function(*args, **kwargs)
    return run_recorded(current_worker.find(), Wishes(), function, *args, **kwargs).value
