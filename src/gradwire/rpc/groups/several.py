"""One call to several workers: each gets it, and the results come in the order of the workers.

The calls leave one after another, and are waited for together. What fails on some workers does not
end the calls on the others; when all have ended, an ExceptionGroup holds what was raised. What was
wrong with the call itself (a UsageError before it leaves) is raised as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from gradwire.agent.peers.directory import Directory, WorkerInfo
from gradwire.errors import GradwireError, PeerLost, RemoteError, UsageError
from gradwire.ids import WorkerId
from gradwire.rpc.calls.client import Target, display_name
from gradwire.rpc.calls.futures import Future
from gradwire.rpc.calls.joined import future_of_all
from gradwire.rpc.groups.group import Group
from gradwire.rpc.retry import can_repeat
from gradwire.rpc.rref import RRef
from gradwire.rpc.worker import Worker

To = str | int | WorkerInfo
Several = list[To] | tuple[To, ...] | Group
KINDS = (list, tuple, Group)
"""the types of `Several`"""
Keep = Callable[[Worker, WorkerId, Target, float], RRef[Any]]


class CallToAll(NamedTuple):
    """One call, and the workers that it is for."""

    worker: Worker
    numbers: list[WorkerId]
    target: Target
    deadline: float

    @property
    def what(self) -> str:
        """Its function, in errors and warnings."""
        return self.target.description or display_name(self.target.name)


def numbers_of(to: Several, directory: Directory) -> list[WorkerId]:
    """The workers that are meant; UsageError if these are none."""
    numbers = [directory.number(each) for each in to]
    if not numbers:
        raise UsageError(
            "a call was given an empty list of workers", hint="pass the name of one, or of several"
        )
    return numbers


def call_each(call: CallToAll) -> Future[list[Any]]:
    """Make the calls; one future of the list of results."""
    names = [call.worker.directory.name(number) for number in call.numbers]
    joined = partial(results_or_raise, call.what, names)
    return future_of_all(_sent(call), joined, f"{call.what} on {', '.join(names)}")


def values_of(call: CallToAll, function: Callable[..., Any]) -> list[Any]:
    """Make the calls and wait; the list of results. An idempotent function is called again."""
    worker, deadline, parts = call.worker, call.deadline, _sent(call)
    outcomes: list[object] = []
    try:
        for number, part in zip(call.numbers, parts, strict=True):
            outcome = _outcome(part)
            while isinstance(outcome, PeerLost) and can_repeat(
                worker, number, function, deadline, outcome
            ):
                outcome = _outcome(worker.calls.call_async(number, call.target, deadline))
            outcomes.append(outcome)
    except BaseException:
        _cancel(parts)
        raise
    names = [worker.directory.name(number) for number in call.numbers]
    return results_or_raise(call.what, names, outcomes)


def keep_on_each(call: CallToAll, keep: Keep) -> list[RRef[Any]]:
    """Make the calls, whose results stay where they are; a list of references to them."""
    outcomes: list[object] = []
    for number in call.numbers:
        try:
            outcomes.append(keep(call.worker, number, call.target, call.deadline))
        except UsageError:
            raise
        except GradwireError as error:
            outcomes.append(error)
    names = [call.worker.directory.name(number) for number in call.numbers]
    return results_or_raise(call.what, names, outcomes)


def results_or_raise(what: str, names: Sequence[str], outcomes: Sequence[Any]) -> list[Any]:
    """The results, or all exceptions among them as a group that names each worker."""
    pairs = zip(names, outcomes, strict=True)
    failed = [(name, error) for name, error in pairs if isinstance(error, Exception)]
    if not failed:
        return list(outcomes)
    where = ", ".join(f"{name} ({_kind(error)})" for name, error in failed)
    text = f"{what} failed on {len(failed)} of {len(names)} workers: {where}"
    raise ExceptionGroup(text, [error for _, error in failed])


def _kind(error: Exception) -> str:
    name = error.type_name if isinstance(error, RemoteError) else type(error).__name__
    return name.rpartition(":")[2]


def _sent(call: CallToAll) -> list[Future[Any]]:
    """The futures of the calls. A worker that cannot be reached has failed its call."""
    calls, parts = call.worker.calls, list[Future[Any]]()
    try:
        for number in call.numbers:
            try:
                parts.append(calls.call_async(number, call.target, call.deadline))
            except UsageError:
                raise
            except GradwireError as error:
                parts.append(calls.failed(error.with_traceback(None)))
    except BaseException:
        _cancel(parts)
        raise
    return parts


def _outcome(part: Future[Any]) -> object:
    try:
        return part.wait()
    except Exception as error:
        return error.with_traceback(None)


def _cancel(parts: Sequence[Future[Any]]) -> None:
    for part in parts:
        part.cancel()
