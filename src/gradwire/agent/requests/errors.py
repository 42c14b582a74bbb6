"""What is said of a request that was not answered: by whom, over which link, in which phase."""

from __future__ import annotations

from gradwire.agent.requests.deadlines import spoken
from gradwire.agent.requests.state import Pending
from gradwire.errors import CallTimeout, DeadlinePassed, GradwireError, NotTrusted, PeerLost
from gradwire.ids import CallId


def late(name: str, call: CallId, pending: Pending, silence: float) -> CallTimeout:
    """Its deadline is over; `silence` is how long the worker gave no sign of life at all."""
    waited = pending.deadline - pending.opened
    silent = f"; it has given no sign of life for {silence:.3g} s" if silence else ""
    within, cut = f"within {max(0.0, float(f'{waited:.2g}')):g} s", spoken(pending.deadline)
    longer = "the outermost call" if cut else "the call, or Timeouts(call=…) in the options"
    error = CallTimeout(
        f"{name} did not answer {call} ({pending.what}) {within}{cut}{silent}",
        hint=f"a longer timeout= on {longer} waits more",
    )
    return error.about(name, phase=pending.phase)


def lost(
    name: str, call: CallId, pending: Pending, reason: GradwireError, link: str, now: float
) -> PeerLost:
    """The link that it went over has ended."""
    where = f"[{pending.phase}, {link}, {now - pending.opened:.3g} s after it was made]"
    error = PeerLost(f"{name} was lost before answering {call} ({pending.what}): {reason} {where}")
    return error.about(name, link=link, phase=pending.phase)


def gone(name: str, reason: GradwireError, link: str) -> PeerLost:
    """There is no link to a worker any more."""
    where = f" [{link}]" if link else ""
    return PeerLost(f"{name} was lost: {reason}{where}").about(name, link=link)


def unsent(name: str, what: str, phase: str, error: BaseException) -> BaseException:
    """What keeps a message from leaving says for whom it was."""
    if isinstance(error, PeerLost):
        kind: type[GradwireError] = NotTrusted if isinstance(error, NotTrusted) else PeerLost
        story = f"{name} was lost before {what} reached it: {error.message}"
    elif isinstance(error, DeadlinePassed):
        kind = CallTimeout
        story = f"{what} did not leave for {name} in time: {error.message}"
    else:
        return error
    phase = error.phase or phase
    return kind(f"{story} [{phase}]", hint=error.hint).about(name, link=error.link, phase=phase)
