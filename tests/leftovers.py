"""What a test leaves behind on the workers of a cluster: nothing, or the test fails.

Other threads may still be about to clean up when a call has returned, so whoever looks waits a
little first, and not longer than it takes.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time


def eventually(condition, seconds: float = 20.0) -> bool:
    """Whether the condition comes true within the time; asks again until it does."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.001)
    return True


def leftovers(workers) -> list[str]:
    """All that the workers still remember of calls, edges, contexts, passes and references."""
    found = []
    for member in workers:
        worker = member.worker
        counts = {
            "contexts": len(worker.engine.contexts),
            "edges sent": len(worker.engine.edges.sent),
            "edges received": len(worker.engine.edges.received),
            "links kept": len(worker.engine.edges.joins),
            "passes": len(worker.engine.passes),
            "requests in flight": worker.agent.in_flight,
            "jobs": worker.agent.dispatch.active,
            **dataclasses.asdict(worker.refs.statistics()),
        }
        found += [f"{worker.name}: {n} {what}" for what, n in counts.items() if n]
    return found


def flush(workers) -> None:
    """Let the workers say at once which edges are over."""
    for member in workers:
        member.worker.engine.releases.flush()


def assert_nothing_left(workers) -> None:
    """Wait until the workers have forgotten everything."""

    def is_clean() -> bool:
        flush(workers)
        return not leftovers(workers)

    if eventually(is_clean, 0.5):
        return
    gc.collect()  # what hung on a cycle, such as an exception and its frames
    if not eventually(is_clean):
        raise AssertionError("left behind: " + ", ".join(leftovers(workers)))
