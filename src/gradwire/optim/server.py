"""Steps that a worker is asked to take: messages in, answers out. The work is the shards'."""

from __future__ import annotations

from typing import cast, final

from gradwire.agent.serving.dispatch import Lane, Payload
from gradwire.agent.serving.inbound_request import Source
from gradwire.current import current_worker
from gradwire.errors import BadMessage, UsageError
from gradwire.optim.messages import Abort, Agreed, Commit, Prepare
from gradwire.optim.shard import Made, Options, Shard
from gradwire.rpc.expose.registry import expose
from gradwire.rpc.worker import Worker


@final
class StepServing:
    """Of one worker, for all shards on it."""

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
        with self._worker.serving_scope(None, deadline):
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
        """Not later than that of a step of our own: others may wait for the same parameters."""
        return min(self._worker.agent.clock.now() + seconds, self._worker.step_deadline())

    def _shard(self, message: Prepare | Commit | Abort, source: Source, deadline: float) -> Shard:
        """The shard of a step: whoever asks must hold it, and asks for a step of its own."""
        ref, step, asker = message.shard, message.step, source.worker
        if step.worker != asker:
            raise BadMessage(f"w{asker} speaks for {step}, which is another worker's")
        shard = self._worker.refs.value_for(asker, ref, deadline)
        if not isinstance(shard, Shard):
            raise UsageError(f"{ref} is a {type(shard).__name__}, not a shard of an optimizer")
        return shard


@expose
def make_shard(cls: type, groups: list[Made], args: tuple[object, ...], kwargs: Options) -> Shard:
    """A shard here, and whoever serves the steps that it is asked for."""
    cast(Worker, current_worker.find()).part(StepServing)
    return Shard(cls, groups, args, kwargs)
