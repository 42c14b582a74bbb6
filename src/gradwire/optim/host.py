"""OptimizerHost: what all optimizers share that step parameters of one worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import cast, final

import torch

from gradwire.current import current_worker
from gradwire.errors import ContextClosed, PeerLost, UsageError
from gradwire.ids import ContextId, WorkerId, first_of
from gradwire.optim.messages import Agreed
from gradwire.optim.parameter_locks import ParameterLocks, StepId
from gradwire.optim.weight_versions import WeightVersions
from gradwire.rpc.worker import Worker


@final
class OptimizerHost:
    """The locks and weight versions of a worker's parameters, and the workers that were lost."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.versions = WeightVersions()
        self.locks = ParameterLocks(worker.agent.clock)
        self._steps = itertools.count(first_of(worker.directory.myself.incarnation))
        worker.engine.saving = self.versions.hooks
        worker.agent.kinds.add(Agreed)
        self.lost: dict[WorkerId, PeerLost] = {}
        worker.agent.on_peer_lost(self._peer_lost)

    def _peer_lost(self, worker: WorkerId, error: PeerLost) -> None:
        self.lost[worker] = error
        self.worker.agent.dispatch.service.submit(lambda: self.locks.worker_lost(worker))

    def gradients(
        self, context: ContextId | None, parameters: Iterable[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradient of each, in a context or in `.grad`; None for those without one."""
        if context is None:
            return [parameter.grad for parameter in parameters]
        try:
            find = self.worker.engine.contexts.find(context).gradients.get
        except ContextClosed:
            raise
        except UsageError:  # the context is open, but no call of it came to this worker
            return [None for _ in parameters]
        return [find(parameter) for parameter in parameters]

    def next_step(self) -> StepId:
        """A new number for a step that this worker asks for."""
        return StepId(self.worker.directory.me.id, next(self._steps))


def optimizer_host() -> OptimizerHost:
    """The host of the current worker."""
    return cast(Worker, current_worker.find()).part(OptimizerHost)
