"""`gradwire.graph`: asks every worker that a graph reaches for its parts, and joins the answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch

from gradwire.agent.agent import Outcome
from gradwire.agent.requests.promise import Promise
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.graph.crossing import RECV, end_of
from gradwire.autograd.graph.lineage import (
    Lineage,
    by_worker,
    from_wire,
    size,
    to_wire,
    union,
)
from gradwire.autograd.scope import current_context
from gradwire.current import current_worker
from gradwire.errors import ArgumentTypeError, BadMessage, GradwireError, PeerLost, UsageError
from gradwire.ids import ContextId, WorkerId
from gradwire.options import Timeout
from gradwire.rpc.graph_cut import Cuts
from gradwire.rpc.worker import Worker, serve_on_every_worker
from gradwire.seeing.graph_describe import describe, maybe_node_of
from gradwire.seeing.graph_join import Answers, check_parts, joined, other_workers
from gradwire.seeing.graph_messages import DescribeGraph, GraphParts
from gradwire.seeing.graph_picture import Graph
from gradwire.seeing.graph_walk import walk

MOST_EDGES = 400
"""of one picture, reached and not reached: more cannot be read"""
_FEWEST = 8
"""of one worker"""
_ANSWER_SECONDS = 10.0
_Asked = dict[WorkerId, Promise[Outcome] | GradwireError]
"""What will be answered, or why the question could not be sent."""


def graph(roots: torch.Tensor | Sequence[torch.Tensor], *, timeout: Timeout = 5.0) -> Graph:
    """A picture of the graph that a tensor depends on, over all workers: a lane for each.

    A box is what lies on one worker between two crossings; an arrow is an edge, with the shape and
    size of what crossed. What was recorded beside it and is not reached is grey. Red is where a
    tensor that requires grad has lately crossed without its graph, with the line that sent it.

    A worker that does not answer within `timeout` seconds has a lane that says so. Only names,
    shapes and sizes leave a worker.

    >>> x = torch.ones(3, requires_grad=True)
    >>> loss = gradwire.rpc_sync("w1", torch.sin, args=(x,)).sum()
    >>> print(gradwire.graph(loss))
    """
    tensors = _checked(roots)
    worker: Worker = current_worker.find()
    return worker.part(GraphDescriber).draw(tensors, worker.deadline(timeout))


def _checked(roots: object) -> list[torch.Tensor]:
    given = list(roots) if isinstance(roots, Sequence) else [roots]
    found = [root for root in given if isinstance(root, torch.Tensor)]
    odd = [type(root).__name__ for root in given if not isinstance(root, torch.Tensor)]
    if odd or not found:
        raise ArgumentTypeError(
            f"graph() was given {f'a {odd[0]}' if odd else 'no tensor'}",
            hint="pass a tensor, or a list of tensors, as in graph(loss)",
        )
    if not any(root.requires_grad for root in found):
        raise UsageError(
            "there is no graph: the tensor does not require grad",
            hint="was it computed under no_grad, or detached?",
        )
    return found


@final
class GraphDescriber:
    """Draws graphs for one worker, and describes its parts of those that others draw."""

    def __init__(self, worker: Worker) -> None:
        self._engine, self._agent, self._cuts = worker.engine, worker.agent, worker.part(Cuts)
        self._me = worker.directory.me.id
        self._name = worker.directory.name
        self._agent.handle(DescribeGraph, self._serve, Lane.SERVICE)
        self._agent.kinds.add(GraphParts)

    def _serve(self, message: DescribeGraph, _: Payload, source: Source) -> None:
        lineage = from_wire(message.lineage)
        parts = describe(self._engine, lineage, message, self._cuts.latest())
        limit = self._agent.clock.now() + _ANSWER_SECONDS
        self._agent.answer(source, parts, deadline=limit)

    def draw(self, roots: Sequence[torch.Tensor], deadline: float) -> Graph:
        """Ask all that the roots depend on, then all that those name besides."""
        lineage, contexts = _reached_from(roots)
        edges = by_worker(lineage)
        most = max(_FEWEST, MOST_EDGES // max(1, len(edges)))
        measures = not len(self._engine.passes)
        question = DescribeGraph(to_wire(lineage), most, contexts, measures)
        first = [worker for worker in sorted(edges) if worker != self._me]
        sent = self._ask(first, question, deadline)
        mine = describe(self._engine, lineage, question, self._cuts.latest(), roots)
        answers = Answers({self._me: mine}, {})
        self._wait_for(sent, answers)
        asked = [self._me, *first]
        others = other_workers(answers, asked)
        self._wait_for(self._ask(others, question, deadline), answers)
        known = {*asked, *others, *other_workers(answers, asked)}
        names = {worker: self._name(worker) for worker in known}
        left_out = {worker: max(0, size(own) - most) for worker, own in edges.items()}
        return joined(answers, names, self._me, left_out)

    def _ask(self, workers: Iterable[WorkerId], question: DescribeGraph, deadline: float) -> _Asked:
        """Ask these at once; those without a connection last, as to make one may take all time."""
        agent, sent = self._agent, _Asked()
        for worker in sorted(workers, key=lambda worker: not agent.is_connected(worker)):
            try:
                _, sent[worker] = agent.request(
                    worker, question, deadline=deadline, description="DescribeGraph"
                )
            except UsageError:  # this worker has shut down
                raise
            except GradwireError as error:
                sent[worker] = error
        return sent

    def _wait_for(self, sent: _Asked, into: Answers) -> None:
        for worker, answer in sent.items():
            if isinstance(answer, Promise):
                self._heard(worker, self._agent.wait_for(worker, answer), into)
            else:
                self._heard(worker, answer, into)

    def _heard(self, worker: WorkerId, outcome: Outcome, into: Answers) -> None:
        try:
            if isinstance(outcome, Exception):
                raise outcome
            if not isinstance(outcome.message, GraphParts):
                raise BadMessage(f"DescribeGraph was answered by {type(outcome.message).__name__}")
            check_parts(outcome.message, worker)
        except PeerLost as error:
            into.silent[worker] = f"lost: {error.message}"
        except Exception as error:
            into.silent[worker] = str(getattr(error, "message", error))
        else:
            into.described[worker] = outcome.message


def _reached_from(roots: Sequence[torch.Tensor]) -> tuple[Lineage, list[ContextId | None]]:
    """All edges that these depend on, and the contexts in which the last ones arrived."""
    nodes = [node for root in roots if (node := maybe_node_of(root)) is not None]
    ends = [end_of(node) for node in walk(nodes).inputs if type(node) is RECV]
    contexts = dict.fromkeys(end.context for end in ends) or {current_context(): None}
    return union([end.origin.lineage for end in ends]), list(contexts)


serve_on_every_worker(GraphDescriber)
