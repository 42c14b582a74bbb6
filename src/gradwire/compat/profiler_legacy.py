"""torch.autograd.profiler_legacy.profile, which also shows what the calls ran on other workers."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

from gradwire.compat.profiles.recording import ThreadProfile, Wishes
from gradwire.current import current_worker


class profile(profiler_legacy.profile):  # torch's name
    """Records this thread, and what the calls made on it run elsewhere.

    The events of another worker have `is_remote`, its number as `node_id`, and names that begin
    with the call: `rpc_sync#f(w0 -> w1)#remote_op: aten::add`.
    """

    _recording: ThreadProfile | None = None

    def _start_trace(self) -> None:
        self._recording = ThreadProfile(
            Wishes(self.record_shapes, self.profile_memory, self.with_flops)
        )
        self._recording.begin(self.config())  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> bool | None:
        if not self.enabled:
            return None
        if self.use_cuda:
            torch.cuda.synchronize()
        recording, self._recording = self._recording, None
        assert recording is not None, "it was entered"
        self._take(recording.all_events(node_here()))
        return False

    def _take(self, events: list[FunctionEvent]) -> None:
        found: Any = EventList(  # type: ignore[no-untyped-call]
            events,
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
        )
        found._build_tree()
        self.function_events: Any = found


def node_here() -> int:
    """The number of this worker, as events have it; -1 without one."""
    worker = current_worker.maybe_find()
    return -1 if worker is None else int(worker.directory.me.id)
