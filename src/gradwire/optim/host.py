"""What one worker keeps for all optimizers that step parameters of its own.

Whose turn it is, where the parameters' values are, and which workers were lost meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import cast, final

import torch

from gradwire.current import current_worker
from gradwire.errors import ContextClosed, PeerLost, UsageError
from gradwire.ids import ContextId, WorkerId, first_of
from gradwire.optim.parameter_locks import StepId, Turns
from gradwire.optim.weight_versions import Storages
from gradwire.rpc.worker import Worker


@final
class Stepped:
    """See the top of this file."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.storages = Storages()
        self.turns = Turns(worker.agent.clock)
        self._steps = itertools.count(first_of(worker.directory.myself.life))
        worker.engine.saving = self.storages.saving
        self.lost: dict[WorkerId, PeerLost] = {}
        worker.agent.on_peer_lost(self._peer_lost)

    def _peer_lost(self, worker: WorkerId, error: PeerLost) -> None:
        self.lost[worker] = error
        self.worker.agent.dispatch.service.submit(lambda: self.turns.worker_lost(worker))

    def gradients(
        self, context: ContextId | None, parameters: Iterable[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradient of each, in a context or in `.grad`."""
        if context is None:
            return [parameter.grad for parameter in parameters]
        try:
            find = self.worker.engine.contexts.find(context).gradients.get
        except ContextClosed:
            raise
        except UsageError:  # whoever asks knows it; it has never come here
            return [None for _ in parameters]
        return [find(parameter) for parameter in parameters]

    def next_step(self) -> StepId:
        """A number for a step that this worker asks for."""
        return StepId(self.worker.directory.me.id, next(self._steps))


def stepped_here() -> Stepped:
    """That of the worker whose code this is."""
    return cast(Worker, current_worker.find()).part(Stepped)
