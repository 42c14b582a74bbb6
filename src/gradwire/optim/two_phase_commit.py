"""Two-phase commit: all owners of an optimizer's parameters step, or none (see optimizer.py).

TwoPhaseCommit coordinates a step on the maker of the optimizer; StepServer takes part on an owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, final

import msgspec
import torch

from gradwire.agent.agent import Outcome
from gradwire.agent.requests.promise import Promise
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.scope import CallScope
from gradwire.errors import BadMessage, CallTimeout, PeerLost, RemoteError, StepFailed, UsageError
from gradwire.ids import ContextId, WorkerId
from gradwire.optim.host import OptimizerHost
from gradwire.optim.messages import Abort, Agreed, Commit, PlainOptions, Prepare, maybe_plain
from gradwire.optim.parameter_locks import StepId
from gradwire.optim.shard import GroupSpec, Options, Shard
from gradwire.options import DEFAULT, Timeout
from gradwire.rpc.expose.registry import expose
from gradwire.rpc.refs.permissions import check_life
from gradwire.rpc.rref import RRef
from gradwire.rpc.worker import Worker, part_of_each_worker

Answers = dict[WorkerId, Any]
StepMessage = Prepare | Commit | Abort
_ABORT_SECONDS = 5.0
_TOLD_SECONDS = 1.0
"""How long to wait for a shard to confirm that it dropped a failed step."""
_GRACE_SECONDS = 0.01
"""The same, if the step failed at its deadline: enough for a shard that answers at once."""
_LATE = " after all workers were prepared"
_ALONE_SHARE = 0.9
"""Of the time left: a shard that waits for its lock in vain must report it before we time out."""


class _StepRequest(msgspec.Struct, frozen=True):
    """What all owners are told of one step."""

    step: StepId
    context: ContextId | None
    options: PlainOptions | None
    deadline: float


@final
class TwoPhaseCommit:
    """Coordinates the steps of all shards of one optimizer."""

    def __init__(self, here: OptimizerHost, shards: dict[WorkerId, RRef[Shard]]) -> None:
        self._here, self._shards = here, shards

    def ask(
        self,
        method: str,
        args: Callable[[WorkerId], tuple[object, ...]],
        owners: Iterable[WorkerId] | None = None,
        seconds: float | None = None,
    ) -> Answers:
        """Call a method of each owner's shard, all at once; an exception is an answer too."""
        asked: Answers = {}
        with torch.no_grad():
            for owner in self._shards if owners is None else owners:
                try:
                    shard = self._shards[owner].rpc_async(seconds)
                    asked[owner] = getattr(shard, method)(*args(owner))
                except Exception as error:
                    asked[owner] = error
            return {owner: _outcome(answer) for owner, answer in asked.items()}

    def step(
        self, context: ContextId | None, options: dict[int, Options], timeout: Timeout
    ) -> None:
        """Step all shards, or raise StepFailed."""
        deadline, step = self._here.worker.step_deadline(timeout), self._here.next_step()
        plain = maybe_plain(options)
        if plain is None:
            ahead = self.ask("set_options", lambda _: (options,), None, self._left(deadline))
            self._check_prepared(step, ahead, deadline)
        asked = _StepRequest(step, context, plain, deadline)
        if len(self._shards) == 1:
            self._step_alone(asked)
        else:
            self._step_together(asked)

    def _step_alone(self, asked: _StepRequest) -> None:
        """Step the only shard: one message, one answer."""
        (owner,) = self._shards
        answer = self._send(owner, self._prepare(asked, owner, alone=True), asked.deadline)
        outcome = self._outcome(owner, answer)
        if outcome is True:
            return
        if isinstance(answer, Promise) and _is_silence(outcome):
            self._check_committed(asked.step, {owner: outcome})
        self._check_prepared(asked.step, {owner: outcome}, asked.deadline)

    def _step_together(self, asked: _StepRequest) -> None:
        step, known = asked.step, dict(self._here.lost)
        answers = self._tell({o: self._prepare(asked, o) for o in self._shards}, asked.deadline)
        self._check_prepared(step, answers, asked.deadline)
        if not all(answers.values()):  # See Note [Locks on many workers], optimizer.py
            self._abort(step, answers, asked.deadline)
            answers = {}
            for owner in sorted(self._shards):
                message = self._prepare(asked, owner, wait=True)
                answers |= self._tell({owner: message}, asked.deadline)
                self._check_prepared(step, answers, asked.deadline)
        self._here.worker.events.emit("prepared", step)
        lost = {o: e for o, e in self._here.lost.items() if known.get(o) is not e}
        self._check_prepared(step, answers | lost, asked.deadline)
        seconds = self._left(asked.deadline)
        commits = {o: Commit(s.handle.ref, step, seconds) for o, s in self._shards.items()}
        self._check_committed(step, self._tell(commits, asked.deadline))

    def _prepare(
        self, asked: _StepRequest, owner: WorkerId, *, wait: bool = False, alone: bool = False
    ) -> Prepare:
        seconds = self._left(asked.deadline) * (_ALONE_SHARE if alone else 1.0)
        ref = self._shards[owner].handle.ref
        return Prepare(ref, asked.step, asked.context, asked.options, seconds, wait, alone)

    def _left(self, deadline: float) -> float:
        return max(0.001, deadline - self._here.worker.agent.clock.now())

    # -- messages

    def _tell(self, messages: Mapping[WorkerId, StepMessage], deadline: float) -> Answers:
        """Send all messages at once and return the answers; an exception is an answer too."""
        sent = {owner: self._send(owner, m, deadline) for owner, m in messages.items()}
        return {owner: self._outcome(owner, answer) for owner, answer in sent.items()}

    def _send(
        self, owner: WorkerId, message: StepMessage, deadline: float
    ) -> Promise[Outcome] | Exception:
        """A promise of the answer, or the exception that kept the message from being sent."""
        what = f"{type(message).__name__} of {message.step}"
        try:
            check_life(self._here.worker.directory, self._shards[owner].handle)
            agent = self._here.worker.agent
            phase = "commit" if isinstance(message, Commit) else "step"
            _, promise = agent.request(
                owner, message, deadline=deadline, description=what, phase=phase
            )
            return promise
        except Exception as error:
            return error

    def _outcome(self, owner: WorkerId, answer: Promise[Outcome] | Exception) -> bool | Exception:
        if isinstance(answer, Exception):
            return answer
        worker = self._here.worker
        worker.agent.wait(owner, lambda: answer.settled, answer.wait)
        outcome = answer.wait()
        if isinstance(outcome, Exception):
            return worker.behavior.of_call(outcome, worker.directory)
        if not isinstance(outcome.message, Agreed):
            return BadMessage(f"a step was answered by {type(outcome.message).__name__}")
        return outcome.message.done

    # -- results

    def _check_prepared(self, step: StepId, answers: Answers, deadline: float) -> None:
        failed = {owner: answers[owner] for owner in self._shards if _is_error(answers.get(owner))}
        if not failed:
            return
        self._drop(step, answers, deadline)
        first = next(iter(failed.values()))
        who = "; ".join(f"{self._name(owner)}: {error}" for owner, error in failed.items())
        error = StepFailed(f"{step} failed, and no worker has stepped. {who}")
        raise error.about(self._names(list(failed)), phase="step") from first

    def _abort(self, step: StepId, answers: Answers, deadline: float) -> None:
        """Drop the step where it is prepared, before it is tried again."""
        limit = min(deadline, self._here.worker.agent.clock.now() + _ABORT_SECONDS)
        told = [owner for owner in self._shards if owner in answers]
        self._tell({owner: self._aborted(step, owner) for owner in told}, limit)

    def _aborted(self, step: StepId, owner: WorkerId) -> Abort:
        return Abort(self._shards[owner].handle.ref, step, _ABORT_SECONDS)

    def _drop(self, step: StepId, answers: Answers, deadline: float) -> None:
        """Drop a step that has failed, without waiting beyond its deadline.

        A shard that does not get the message in time drops the step at its own deadline. A silent
        worker may have stopped reading, so that sending to it blocks: another thread sends to it.
        """
        agent = self._here.worker.agent
        now = agent.clock.now()
        limit, told = now + _ABORT_SECONDS, []
        for owner in [owner for owner in self._shards if owner in answers]:
            abort = self._aborted(step, owner)
            if _is_silence(answers[owner]):
                agent.dispatch.service.submit(partial(self._send, owner, abort, limit))
            else:
                told.append(self._send(owner, abort, limit))
        until = max(min(now + _TOLD_SECONDS, deadline), now + _GRACE_SECONDS)
        with agent.dispatch.user.waiting():
            for answer in told:
                if isinstance(answer, Promise):
                    with suppress(TimeoutError):
                        answer.wait(until - agent.clock.now())

    def _check_committed(self, step: StepId, answers: Answers) -> None:
        if all(answer is True for answer in answers.values()):
            return
        stepped = [owner for owner, answer in answers.items() if answer is True]
        late = [owner for owner, answer in answers.items() if answer is False]
        lost = [owner for owner, answer in answers.items() if isinstance(answer, PeerLost)]
        unknown = [owner for owner in answers if owner not in {*stepped, *late, *lost}]
        errors = [answer for answer in answers.values() if _is_error(answer)]
        says = {
            "have stepped": stepped,
            "were lost, with their parameters": lost,
            "had given the step up": late,
            "may have stepped": unknown,
        }
        story = "; ".join(f"{self._names(who)} {what}" for what, who in says.items() if who)
        error = StepFailed(
            f"{step} failed{'' if len(answers) == 1 else _LATE}: {story}. "
            + "; ".join(map(str, errors)),
            stepped=tuple(map(self._name, stepped)),
            unknown=tuple(map(self._name, unknown)),
            hint="load a saved state before going on, unless the workers that have not stepped "
            "are gone for good",
        )
        error.about(self._names([*late, *lost, *unknown]), phase="commit")
        raise error from (errors[0] if errors else None)

    def _names(self, owners: list[WorkerId]) -> str:
        return ", ".join(map(self._name, owners))

    def _name(self, owner: WorkerId) -> str:
        return self._here.worker.directory.name(owner)


def _is_silence(answer: object) -> bool:
    """Whether a worker has not answered a message that was sent to it."""
    return isinstance(answer, PeerLost | CallTimeout) and not isinstance(answer, RemoteError)


def _is_error(answer: object) -> bool:
    return isinstance(answer, Exception)


def _outcome(answer: Any) -> Any:  # noqa: ANN401
    """The result of a future, or its exception; an exception in its place stays as it is."""
    if isinstance(answer, Exception):
        return answer
    try:
        return answer.wait()
    except Exception as error:  # a worker's; with compat, of torch's types
        return error


@part_of_each_worker
@final
class StepServer:
    """Handles the messages of steps for all shards of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        agent = worker.agent
        agent.handle(Prepare, self._prepare, Lane.USER, lambda message: message.shard)
        agent.handle(Commit, self._commit, Lane.USER)
        agent.handle(Abort, self._abort, Lane.USER)
        agent.kinds.add(Agreed)

    def _prepare(self, message: Prepare, _: Payload, source: Source) -> None:
        deadline = self._deadline(message.seconds)
        step, context, options = message.step, message.context, message.options
        with CallScope(self._worker, None, deadline):
            shard = self._shard(message, source, deadline)
            if message.alone:
                shard.step(step, context, options, deadline)
                done = True
            else:
                done = shard.prepare(step, context, options, deadline, wait=message.wait)
        self._worker.agent.answer(source, Agreed(done), deadline=deadline)

    def _commit(self, message: Commit, _: Payload, source: Source) -> None:
        deadline = self._deadline(message.seconds)
        done = self._shard(message, source, deadline).commit(message.step)
        self._worker.agent.answer(source, Agreed(done), deadline=deadline)

    def _abort(self, message: Abort, _: Payload, source: Source) -> None:
        deadline = self._deadline(message.seconds)
        self._shard(message, source, deadline).abort(message.step)
        self._worker.agent.answer(source, Agreed(True), deadline=deadline)

    def _deadline(self, seconds: float) -> float:
        """At most the step timeout of this worker, because others wait for the same parameters."""
        return min(self._worker.agent.clock.now() + seconds, self._worker.step_deadline(DEFAULT))

    def _shard(self, message: Prepare | Commit | Abort, source: Source, deadline: float) -> Shard:
        """The shard of a step; the peer must hold a reference to it, and have made the step."""
        ref, step, asker = message.shard, message.step, source.worker
        if step.worker != asker:
            raise BadMessage(f"w{asker} sent a message for {step}, which is another worker's")
        shard = self._worker.refs.value_for(asker, ref, deadline)
        if not isinstance(shard, Shard):
            raise UsageError(f"{ref} is a {type(shard).__name__}, not a shard of an optimizer")
        return shard


@expose
def make_shard(
    cls: type, groups: list[GroupSpec], args: tuple[object, ...], kwargs: Options
) -> Shard:
    """A shard of this worker."""
    return Shard(cls, groups, args, kwargs)
