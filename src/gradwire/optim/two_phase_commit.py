"""TwoPhaseCommit: all owners of an optimizer's parameters step, or none (see optimizer.py).

It coordinates a step on the optimizer's maker. OptimizerHost (shard.py) takes part on an owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, final

import torch

from gradwire.agent.agent import Outcome
from gradwire.agent.requests.promise import Promise
from gradwire.errors import BadMessage, CallTimeout, PeerLost, RemoteError, StepFailed
from gradwire.ids import ContextId, WorkerId
from gradwire.optim.messages import Abort, Agreed, Commit, Prepare, StepMessage, maybe_plain
from gradwire.optim.shard import OptimizerHost, Options, Shard
from gradwire.options import Timeout
from gradwire.rpc.refs.exchange import check_incarnation
from gradwire.rpc.rref import RRef

Answers = dict[WorkerId, Any]
_ABORT_SECONDS = 5.0
_TOLD_SECONDS = 1.0
"""How long to wait for a shard to confirm that it dropped a failed step."""
_GRACE_SECONDS = 0.01
"""The same, if the step failed at its deadline: enough for a shard that answers at once."""
_ALONE_SHARE = 0.9
"""The share of the remaining time for a single shard, so that its lock times out before we do."""


@final
class TwoPhaseCommit:
    """Coordinates one step of all shards of an optimizer."""

    def __init__(
        self,
        here: OptimizerHost,
        shards: Mapping[WorkerId, RRef[Shard]],
        context: ContextId | None,
        options: dict[int, Options],
        timeout: Timeout,
    ) -> None:
        self._here, self._shards = here, shards
        self._worker, self._lost = here.worker, here.lost
        self._deadline, self._step = here.worker.step_deadline(timeout), here.next_step()
        self._context, self._options = context, maybe_plain(options)
        self._given = options

    def run(self) -> None:
        """Step all shards, or raise StepFailed."""
        observer = self._worker.events.observer
        try:
            if observer is None:
                self._run()
            else:
                with observer.step(self._step, [*map(self._worker.directory.name, self._shards)]):
                    self._run()
        except BaseException:
            self._here.failed += 1
            raise
        self._here.stepped += 1

    def _run(self) -> None:
        if self._options is None:  # options that Prepare cannot carry are sent first
            given = (self._given,)
            self._check_prepared(ask(self._shards, "set_options", lambda _: given, self._left()))
        if len(self._shards) == 1:
            self._step_alone()
        else:
            self._step_together()

    def _step_alone(self) -> None:
        """Step the only shard: one message, one answer."""
        (owner,) = self._shards
        answer = self._send(owner, self._prepare(owner, wait=True, alone=True), self._deadline)
        outcome = self._outcome(owner, answer)
        if outcome is True:
            return
        if isinstance(answer, Promise) and _is_silence(outcome):  # it may have stepped
            self._check_committed({owner: outcome})
        self._check_prepared({owner: outcome})

    def _step_together(self) -> None:
        known, step, shards = dict(self._lost), self._step, self._shards
        answers = self._tell({o: self._prepare(o) for o in shards}, self._deadline)
        self._check_prepared(answers)
        # If another step has locked one of them: abort, then lock in the order of the workers.
        # See Note [Locks on many workers], optimizer.py.
        if not all(answers.values()):
            limit = min(self._deadline, self._worker.agent.clock.now() + _ABORT_SECONDS)
            aborts = {o: Abort(s.handle.ref, step, _ABORT_SECONDS) for o, s in shards.items()}
            self._tell(aborts, limit)
            answers = {}
            for owner in sorted(shards):
                answers |= self._tell({owner: self._prepare(owner, wait=True)}, self._deadline)
                self._check_prepared(answers)
        if (record := self._worker.events.record) is not None:
            record("prepared", self._worker.agent.clock.now(), step)
        # Owners that were lost since they prepared.
        lost = {o: e for o, e in self._lost.items() if known.get(o) is not e}
        self._check_prepared(answers | lost)
        seconds = self._left()
        commits = {o: Commit(s.handle.ref, step, seconds) for o, s in shards.items()}
        self._check_committed(self._tell(commits, self._deadline))

    # -- messages

    def _prepare(self, owner: WorkerId, *, wait: bool = False, alone: bool = False) -> Prepare:
        seconds = self._left() * (_ALONE_SHARE if alone else 1.0)
        ref = self._shards[owner].handle.ref
        return Prepare(ref, self._step, self._context, self._options, seconds, wait, alone)

    def _left(self) -> float:
        return max(0.001, self._deadline - self._worker.agent.clock.now())

    def _tell(self, messages: Mapping[WorkerId, StepMessage], deadline: float) -> Answers:
        """Send all messages at once; return the answers, for a failed shard its exception."""
        sent = {owner: self._send(owner, m, deadline) for owner, m in messages.items()}
        return {owner: self._outcome(owner, answer) for owner, answer in sent.items()}

    def _send(
        self, owner: WorkerId, message: StepMessage, deadline: float
    ) -> Promise[Outcome] | Exception:
        """A promise of the answer, or the exception that kept the message from being sent."""
        what = f"{type(message).__name__} of {message.step}"
        phase = "commit" if isinstance(message, Commit) else "step"
        agent = self._worker.agent
        try:
            check_incarnation(agent.directory, self._shards[owner].handle)
            _, promise = agent.request(
                owner, message, deadline=deadline, description=what, phase=phase
            )
            return promise
        except Exception as error:
            return error

    def _outcome(self, owner: WorkerId, answer: Promise[Outcome] | Exception) -> bool | Exception:
        """The answer of a shard, or the exception in its place."""
        if isinstance(answer, Exception):
            return answer
        worker = self._worker
        outcome = worker.agent.wait_for(owner, answer)
        if isinstance(outcome, Exception):
            return worker.behavior.of_call(outcome, worker.directory)
        if not isinstance(outcome.message, Agreed):
            return BadMessage(f"a step was answered by {type(outcome.message).__name__}")
        return outcome.message.done

    # -- results

    def _check_prepared(self, answers: Answers) -> None:
        """Drop the step everywhere and raise StepFailed if an owner failed to prepare."""
        asked = {owner: answers[owner] for owner in self._shards if owner in answers}
        failed = {owner: a for owner, a in asked.items() if isinstance(a, Exception)}
        if not failed:
            return
        self._drop(asked)
        who = "; ".join(f"{self._names([owner])}: {error}" for owner, error in failed.items())
        error = StepFailed(f"{self._step} failed, and no worker has stepped. {who}")
        raise error.about(self._names(failed), phase="step") from next(iter(failed.values()))

    def _drop(self, answers: Answers) -> None:
        """Drop a step that has failed, without waiting beyond its deadline.

        A shard that does not get the message in time drops the step at its own deadline.
        """
        agent = self._worker.agent
        now = agent.clock.now()
        limit, sent = now + _ABORT_SECONDS, []
        for owner, answer in answers.items():
            abort = Abort(self._shards[owner].handle.ref, self._step, _ABORT_SECONDS)
            if _is_silence(answer):  # it may have stopped reading, so that sending to it blocks
                agent.dispatch.service.submit(partial(self._send, owner, abort, limit))
            else:
                sent.append(self._send(owner, abort, limit))
        until = max(min(now + _TOLD_SECONDS, self._deadline), now + _GRACE_SECONDS)
        with agent.dispatch.user.waiting():
            for promise in sent:
                if isinstance(promise, Promise):
                    with suppress(TimeoutError):
                        promise.wait(until - agent.clock.now())

    def _check_committed(self, answers: Answers) -> None:
        if all(answer is True for answer in answers.values()):
            return
        stepped = [owner for owner, answer in answers.items() if answer is True]
        late = [owner for owner, answer in answers.items() if answer is False]
        lost = [owner for owner, answer in answers.items() if isinstance(answer, PeerLost)]
        unknown = [owner for owner in answers if owner not in {*stepped, *late, *lost}]
        errors = [answer for answer in answers.values() if isinstance(answer, Exception)]
        says = {
            "have stepped": stepped,
            "were lost, with their parameters": lost,
            "had aborted the step": late,
            "may have stepped": unknown,
        }
        outcome = "; ".join(f"{self._names(who)} {what}" for what, who in says.items() if who)
        when = "" if len(answers) == 1 else " after all workers were prepared"
        name = self._worker.directory.name
        error = StepFailed(
            f"{self._step} failed{when}: {outcome}. " + "; ".join(map(str, errors)),
            stepped=tuple(map(name, stepped)),
            unknown=tuple(map(name, unknown)),
            hint="load a saved state before going on, unless the workers that have not stepped "
            "are gone for good",
        )
        error.about(self._names([*late, *lost, *unknown]), phase="commit")
        raise error from (errors[0] if errors else None)

    def _names(self, owners: Iterable[WorkerId]) -> str:
        return ", ".join(map(self._worker.directory.name, owners))


def _is_silence(answer: object) -> bool:
    """Whether a worker was lost or timed out, and has not reported such an error itself."""
    return isinstance(answer, PeerLost | CallTimeout) and not isinstance(answer, RemoteError)


def ask(
    shards: Mapping[WorkerId, RRef[Shard]],
    method: str,
    args: Callable[[WorkerId], tuple[object, ...]],
    seconds: float | None = None,
) -> Answers:
    """Call a method of all shards at once; return the results, for a failed shard its exception."""
    answers: Answers = {}
    with torch.no_grad():
        for owner, shard in shards.items():
            try:
                answers[owner] = getattr(shard.rpc_async(seconds), method)(*args(owner))
            except Exception as error:
                answers[owner] = error
        for owner, asked in answers.items():
            if not isinstance(asked, Exception):
                try:
                    answers[owner] = asked.wait()
                except Exception as error:  # of any type: the worker's, under compat torch's
                    answers[owner] = error
    return answers
