"""Telling others that a context is closed, and again if it did not leave.

Only the opener of a context closes it, and tells every worker that knows it: those it has called in
it, and those that have heard of it from somebody else, which ask the opener to be told. A worker
drops the contexts of an opener that is lost. One that was too slow to take the message must still
hear it, or it would keep the gradients of the context for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.requests.timer import Resender
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.graph.context import Contexts
from gradwire.autograd.messages import Attended, Forget, QueryContext
from gradwire.errors import BadMessage, DeadlinePassed, GradwireError, UsageError
from gradwire.ids import ContextId, WorkerId, count_of, opener_of, spoken_context

_SECONDS = 10.0
_AT_ONCE_SECONDS = 1.0
"""The same for the first try, on the thread of whoever closes the context: it does not wait long
for a peer that cannot be reached. The next tries have threads of their own."""
_FIRST_AGAIN_SECONDS = 0.25
_TIMES = 10


@final
class Forgetting:
    """What one worker has to say about contexts that are closed."""

    def __init__(
        self, agent: Agent, contexts: Contexts, close: Callable[[ContextId, str | None], None]
    ) -> None:
        self._agent, self._contexts, self._close = agent, contexts, close
        self._resender: Resender[Callable[[], None]] = Resender(agent.timer, self._send_again)
        agent.handle(Forget, self._serve_forget, Lane.SERVICE)
        agent.handle(QueryContext, self._serve_query, Lane.SERVICE)
        agent.kinds.add(Attended)

    def tell(self, worker: WorkerId, context: ContextId, tried: int = 0) -> None:
        """Tell it now, or later if that fails."""
        try:
            limit = self._agent.clock.now() + (_SECONDS if tried else _AT_ONCE_SECONDS)
            self._agent.tell(worker, Forget(context), deadline=limit)
        except UsageError:  # this worker has shut down
            return
        except GradwireError:
            self._agent.events.emit("unforgotten", spoken_context(context))
            if tried < _TIMES:
                again = partial(self.tell, worker, context, tried + 1)
                self._resender.keep(again, _FIRST_AGAIN_SECONDS * 2**tried)

    def ask(self, context: ContextId, tried: int = 0) -> None:
        """Ask its opener to tell when a context is closed; close it here if it is closed there."""
        if self._contexts.maybe(context) is None:
            return
        heard = partial(self._heard, context, tried)
        limit = self._agent.clock.now() + _SECONDS
        what = f"whether {spoken_context(context)} is open"
        try:
            _, answer = self._agent.request(
                opener_of(context), QueryContext(context), deadline=limit, description=what
            )
        except UsageError:  # this worker has shut down
            return
        except GradwireError as error:
            heard(error)
        else:
            answer.on_settled(heard)

    def _heard(self, context: ContextId, tried: int, outcome: Outcome) -> None:
        """Who does not answer in time is asked again; without an opener there is no context."""
        if isinstance(outcome, DeadlinePassed) and tried < _TIMES:
            again = partial(self.ask, context, tried + 1)
            self._resender.keep(again, _FIRST_AGAIN_SECONDS * 2**tried)
            return
        said = outcome.message if isinstance(outcome, Answer) else None
        if not isinstance(said, Attended) or not said.is_open:
            opener = self._agent.directory.name(opener_of(context))
            lost = opener if isinstance(outcome, Exception) else None
            self._agent.dispatch.service.submit(partial(self._close, context, lost))

    def _serve_forget(self, message: Forget, _: Payload, source: Source) -> None:
        if source.worker != opener_of(message.context):
            context = spoken_context(message.context)
            raise BadMessage(f"w{source.worker} closes {context}, which it has not opened")
        self._close(message.context, None)

    def _serve_query(self, message: QueryContext, _: Payload, source: Source) -> None:
        if opener_of(message.context) != self._agent.directory.me.id:
            raise BadMessage(f"{spoken_context(message.context)} was not opened here")
        context = self._contexts.maybe(message.context)
        if context is not None:
            context.called.add(source.worker)
            context = self._contexts.maybe(message.context)  # it may have closed just before
        is_open = context is not None or count_of(message.context) >= self._contexts.opened
        limit = self._agent.clock.now() + _SECONDS
        self._agent.answer(source, Attended(is_open), deadline=limit)

    def _send_again(self, due: list[Callable[[], None]]) -> None:
        for act in due:
            self._agent.dispatch.service.submit(act)
