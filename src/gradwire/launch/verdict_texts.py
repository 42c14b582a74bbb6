"""A verdict in words: what `run` raises when a worker died or a wait was given up. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from gradwire.errors import DeadlinePassed, GradwireError, JoinTimeout, PeerLost, UsageError
from gradwire.launch.supervise_state import Died, Overdue, Stage

GUARD = 'a script calls run() under `if __name__ == "__main__":`, for every worker imports it'

WHEN = {
    Stage.STARTING: "while it started",
    Stage.WORKING: "while it was at work",
    Stage.LEAVING: "while it was leaving",
    Stage.LEFT: "after it had left",
}


def death(died: Died, names: Sequence[str]) -> GradwireError:
    """Who died, of what, and when."""
    name, how = names[died.worker], ending(died.status)
    if died.stage is Stage.STARTING and died.status > 0:
        return UsageError(
            f"{name} could not start: it ended with {how} while importing the script",
            hint=f"what it printed says why; {GUARD}",
        )
    return PeerLost(f"{name} died ({how}) {WHEN[died.stage]}", hint="what it printed may say why")


def overdue(late: Overdue, names: Sequence[str], timeout: float | None) -> DeadlinePassed:
    """Whom a wait was given up on, and which."""
    who = ", ".join(names[worker] for worker in late.workers)
    if late.due is Stage.WORKING:
        return JoinTimeout(
            f"{who} did not start in time",
            hint="each worker imports the script first; a longer Timeouts(join=…) waits longer",
        )
    if late.due is Stage.LEFT:
        return DeadlinePassed(
            f"{who} did not end in time after the function had returned",
            hint="something still runs there; a longer Timeouts(shutdown=…) waits longer",
        )
    return DeadlinePassed(
        f"run() gave up on {who} after {timeout:g} s", hint="a longer timeout= waits longer"
    )


def ending(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
