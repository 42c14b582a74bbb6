"""All owners step, or none: see the top of optimizer.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from gradwire.errors import PeerLost, StepFailed
from gradwire.ids import ContextId, WorkerId
from gradwire.optim.shard import Options, Shard, Stepped
from gradwire.optim.turns import StepId
from gradwire.rpc.rref import RRef

Answers = dict[WorkerId, Any]
_ABORT_SECONDS = 5.0


@final
class Agreement:
    """The shards of one optimizer, asked together."""

    def __init__(self, here: Stepped, shards: dict[WorkerId, RRef[Shard]]) -> None:
        self._here, self._shards = here, shards

    def ask(
        self,
        method: str,
        args: Callable[[WorkerId], tuple[object, ...]],
        owners: Iterable[WorkerId] | None = None,
        seconds: float | None = None,
    ) -> Answers:
        """What each owner's shard returns, all asked at once; errors are answers too."""
        asked: Answers = {}
        with torch.no_grad():
            for owner in self._shards if owners is None else owners:
                try:
                    shard = self._shards[owner].rpc_async(seconds)
                    asked[owner] = getattr(shard, method)(*args(owner))
                except Exception as error:
                    asked[owner] = error
            return {owner: _outcome(answer) for owner, answer in asked.items()}

    def step(self, context: ContextId | None, options: dict[int, Options]) -> None:
        """Take one step everywhere, or raise StepFailed."""
        worker = self._here.worker
        deadline = worker.step_deadline()
        step, known = self._here.next_step(), dict(self._here.lost)

        def prepare(owners: list[WorkerId], wait: bool) -> Answers:
            seconds = max(0.001, deadline - worker.agent.clock.now())
            args = (tuple(step), context, options, seconds, wait)
            return self.ask("prepare", lambda _: args, owners, seconds)

        answers = prepare(list(self._shards), len(self._shards) == 1)
        self._check_prepared(step, answers)
        if not all(answers.values()):  # See Note [Turns on many workers], optimizer.py
            self._abort(step, answers)
            answers = {}
            for owner in sorted(self._shards):
                answers |= prepare([owner], wait=True)
                self._check_prepared(step, answers)
        worker.events.emit("prepared", step)
        lost = {o: e for o, e in self._here.lost.items() if known.get(o) is not e}
        self._check_prepared(step, answers | lost)
        seconds = max(0.001, deadline - worker.agent.clock.now())
        self._check_committed(step, self.ask("commit", lambda _: (tuple(step),), None, seconds))

    def _check_prepared(self, step: StepId, answers: Answers) -> None:
        failed = {owner: answers[owner] for owner in self._shards if _is_error(answers.get(owner))}
        if not failed:
            return
        self._abort(step, answers)
        first = next(iter(failed.values()))
        who = "; ".join(f"{self._name(owner)}: {error}" for owner, error in failed.items())
        raise StepFailed(f"{step} failed, and no worker has stepped. {who}") from first

    def _abort(self, step: StepId, answers: Answers) -> None:
        owners = [owner for owner in self._shards if owner in answers]
        self.ask("abort", lambda _: (tuple(step),), owners, _ABORT_SECONDS)

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
        raise StepFailed(
            f"{step} failed after all workers were prepared: {story}. "
            + "; ".join(map(str, errors)),
            stepped=tuple(map(self._name, stepped)),
            unknown=tuple(map(self._name, unknown)),
            hint="load a saved state before going on, unless the workers that have not stepped "
            "are gone for good",
        ) from (errors[0] if errors else None)

    def _names(self, owners: list[WorkerId]) -> str:
        return ", ".join(map(self._name, owners))

    def _name(self, owner: WorkerId) -> str:
        return self._here.worker.directory.name(owner)


def _is_error(answer: object) -> bool:
    return isinstance(answer, Exception)


def _outcome(answer: Any) -> Any:  # noqa: ANN401
    """What a future came to; an error that was the answer already stays."""
    if isinstance(answer, Exception):
        return answer
    try:
        return answer.wait()
    except Exception as error:  # what a worker raised; under compat, of torch's types
        return error
