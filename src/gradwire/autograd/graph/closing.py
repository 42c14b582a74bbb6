"""Telling others that a context is closed, and again if it did not leave.

A peer that is lost drops its contexts by itself; one that was too slow to take the message must
still hear it, or it would keep the graph for ever.

Each worker tells those it called, so the word goes along the calls. Where one of them is lost the
word stops: whoever may have known a context from it asks the opener, who tells it from then on.

Note [Whose word it is]: the numbers of contexts can be guessed, and nobody ends what is another's.
The word of the opener is enough. That of a caller is if nobody else has called here in the context:
else it is for the others to say, or for the opener, which is asked unless it is one of them. So it
is about whoever says so without having called; its call may be on the way. A context that is
closed on the word of a caller is closed for that one: if others call in it they get an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.requests.timer import Resender
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.graph.context import Context, Contexts
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
        self,
        agent: Agent,
        contexts: Contexts,
        close: Callable[[ContextId, str | None, WorkerId | None], None],
    ) -> None:
        self._agent, self._contexts, self._close = agent, contexts, close
        self._resender: Resender[Callable[[], None]] = Resender(agent.timer, self._send_again)
        agent.handle(Forget, self._serve_forget, Lane.SERVICE)
        agent.handle(QueryContext, self._serve_attend, Lane.SERVICE)
        agent.kinds.add(Attended)

    def tell(self, worker: WorkerId, said: Forget, tried: int = 0) -> None:
        """Tell it now, or later if that fails."""
        try:
            limit = self._agent.clock.now() + (_SECONDS if tried else _AT_ONCE_SECONDS)
            self._agent.tell(worker, said, deadline=limit)
        except UsageError:  # this worker has shut down
            return
        except GradwireError:
            self._agent.events.emit("unforgotten", spoken_context(said.context))
            if tried < _TIMES:
                again = partial(self.tell, worker, said, tried + 1)
                self._resender.keep(again, _FIRST_AGAIN_SECONDS * 2**tried)

    def ask(self, context: ContextId, tried: int = 0) -> None:
        """Ask its opener whether a context is still open; close it here if not."""
        if self._contexts.maybe(context) is not None:
            self._ask(context, partial(self._heard, context, tried))

    def _ask(self, context: ContextId, heard: Callable[[Outcome], None]) -> None:
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
        if not _is_open(outcome):
            opener = self._agent.directory.name(opener_of(context))
            lost = opener if isinstance(outcome, Exception) else None
            self._agent.dispatch.service.submit(partial(self._close, context, lost, None))

    def _serve_forget(self, message: Forget, _: Payload, source: Source) -> None:
        """See Note [Whose word it is]."""
        id, said_by, opener = message.context, source.worker, opener_of(message.context)
        context = self._contexts.maybe(id)
        callers = set() if context is None else context.callers
        if opener == self._agent.directory.me.id:
            if context is not None:
                self._dropped_elsewhere(context, message.lost, said_by)
        elif said_by == opener:
            self._close(id, message.lost or None, None)
        elif callers == {said_by}:
            self._close(id, message.lost or None, said_by)
        elif not callers >= {opener, said_by} and not self._contexts.is_over(id):
            self._ask(id, partial(self._checked, id, said_by))

    def _dropped_elsewhere(self, context: Context, lost: str, said_by: WorkerId) -> None:
        """Somebody has dropped a context of our own: one who takes part, and has lost us."""
        if not lost or said_by not in context.callers | context.called:
            raise _not_closed(context.id, said_by)
        name = self._agent.directory.name(said_by)
        context.broken = f"{name} heard that {lost} was lost, and has dropped it"

    def _checked(self, id: ContextId, said_by: WorkerId, outcome: Outcome) -> None:
        """What the opener says about a peer that said it was closed."""
        if _is_open(outcome):
            self._agent.noting.note(said_by, _not_closed(id, said_by))
        else:
            self._heard(id, 0, outcome)

    def _serve_attend(self, message: QueryContext, _: Payload, source: Source) -> None:
        if opener_of(message.context) != self._agent.directory.me.id:
            raise BadMessage(f"{spoken_context(message.context)} was not opened here")
        context = self._contexts.maybe(message.context)
        if context is not None:
            context.called.add(source.worker)
            context = self._contexts.maybe(message.context)  # it may have closed just before
        is_open = context is not None or count_of(message.context) >= self._contexts.opened
        said = Attended(is_open)
        self._agent.answer(source, said, deadline=self._agent.clock.now() + _SECONDS)

    def _send_again(self, due: list[Callable[[], None]]) -> None:
        for act in due:
            self._agent.dispatch.service.submit(act)


def _is_open(outcome: Outcome) -> bool:
    said = outcome.message if isinstance(outcome, Answer) else None
    return isinstance(said, Attended) and said.is_open


def _not_closed(context: ContextId, said_by: WorkerId) -> BadMessage:
    return BadMessage(f"w{said_by} says that {spoken_context(context)} is closed, which is open")
