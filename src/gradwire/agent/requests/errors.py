"""The errors of requests that were not answered: they name the peer, the link and the phase."""

from __future__ import annotations

from gradwire.agent.requests.promise import Pending
from gradwire.agent.requests.timer import explain_shortening
from gradwire.errors import CallTimeout, DeadlinePassed, GradwireError, NotTrusted, PeerLost
from gradwire.ids import CallId


def late(name: str, call: CallId, pending: Pending, silence: float) -> CallTimeout:
    """The deadline has passed; `silence` is for how long the worker has sent nothing at all."""
    waited = pending.deadline - pending.opened
    silent = f"; it has given no sign of life for {silence:.3g} s" if silence else ""
    within = f"within {max(0.0, float(f'{waited:.2g}')):g} s"
    cut = explain_shortening(pending.deadline)
    longer = "the outermost call" if cut else "the call, or Timeouts(call=…) in the options"
    error = CallTimeout(
        f"{name} did not answer {call} ({pending.description}) {within}{cut}{silent}",
        hint=f"a longer timeout= on {longer} waits more",
    )
    return error.about(name, phase=pending.phase)


def lost(
    name: str, call: CallId, pending: Pending, reason: GradwireError, link: str, now: float
) -> PeerLost:
    """The link that it was sent over has ended."""
    where = f"[{pending.phase}, {link}, {now - pending.opened:.3g} s after it was made]"
    error = PeerLost(
        f"{name} was lost before answering {call} ({pending.description}): {reason} {where}"
    )
    return error.about(name, link=link, phase=pending.phase)


def gone(name: str, reason: GradwireError, link: str) -> PeerLost:
    """The last link to a worker has ended."""
    where = f" [{link}]" if link else ""
    return PeerLost(f"{name} was lost: {reason}{where}").about(name, link=link)


def unsent(name: str, what: str, phase: str, error: BaseException) -> BaseException:
    """A message could not be sent: add the peer and the phase to the error."""
    if isinstance(error, PeerLost):
        kind: type[GradwireError] = NotTrusted if isinstance(error, NotTrusted) else PeerLost
        text = f"{name} was lost before {what} reached it: {error.message}"
    elif isinstance(error, DeadlinePassed):
        kind = CallTimeout
        text = f"{what} did not leave for {name} in time: {error.message}"
    else:
        return error
    phase = error.phase or phase
    return kind(f"{text} [{phase}]", hint=error.hint).about(name, link=error.link, phase=phase)
