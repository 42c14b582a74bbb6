"""The edges of one worker, each of which lives exactly as long as its Recv.

When a Recv dies, its edge is queued here until its sender is told (release.py). The sender drops
the token of the Send, which may free Recvs there, and so on upstream (docs/concepts/graph.md). So
all edges that a living Recv depends on exist: messages never name a released edge, and every Send
that a Start names is there, unless a peer was lost or a context was closed early.

Note [Edges are not locked]: to record an edge creates objects. That may run the garbage collector,
and so a finalizer of the user, which may send tensors itself. So no lock is held there. Each change
is one step for the interpreter, or harmless if it is done twice: two Joins may stand for one set,
two edges may have one depth. Passes use the worker's lock.

Note [When a Recv is gone]: when the collector frees a cycle, it clears weak references before it
calls finalizers, and a finalizer may bring the graph back to life. So what is watched is an empty
array that only the Recv holds. The collector does not track arrays: it dies only with the Recv.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, final

import msgspec
import numpy
import torch

from gradwire.agent.serving.peer_limits import over
from gradwire.autograd.graph.lineage import Lineage, meets, numbers, one, union
from gradwire.autograd.graph.walk import ROOM
from gradwire.current import UserLine
from gradwire.errors import BadMessage, PeerLost
from gradwire.ids import EdgeId, WorkerId
from gradwire.torch_private import Node

if TYPE_CHECKING:
    from gradwire.autograd.graph.crossing import EdgeEnd

_LOST_REMEMBERED = 1 << 12
_DEEP = ROOM // 2


class Sent(msgspec.Struct, frozen=True):
    """A crossing that left here. An engine run with `token` as its root executes the Send."""

    edge: EdgeId
    peer: WorkerId
    lineage: Lineage
    depth: int
    token: torch.Tensor
    node: Node
    """the Send"""
    bytes: int
    """the size of the tensors, in dense form"""
    made_at: float
    """by the clock of the worker"""
    line: UserLine | None
    """of the user's program that sent it; None if it is the result of a call, or a gradient"""


class LiveEdge(NamedTuple):
    """An edge that holds a graph here: a worker still holds a tensor that has crossed by it."""

    edge: str
    to: str
    """the worker that holds it"""
    age: float
    """in seconds"""
    bytes: int
    """of the tensors that have crossed by it; the graph behind them may hold more"""
    line: str
    """file:line of the program that sent them, or "a result\""""


class Join(msgspec.Struct, frozen=True):
    """One node for a set of Sends, so that a Recv that needs many of them has one link.

    It is dropped when the first of its edges is released: it holds nothing that `sent` does not.
    """

    edges: Lineage
    depth: int
    token: torch.Tensor


@final
class RecvRef(weakref.ref[Any]):
    """Tells the end of a Recv; see Note [When a Recv is gone]."""

    __slots__ = ("n", "node")
    n: int
    node: weakref.ref[Node]


@final
class FromPeer:
    """The edges that came from one sender, by number."""

    __slots__ = ("alive", "dead", "untold")

    def __init__(self) -> None:
        self.alive: dict[int, RecvRef] = {}
        self.dead: deque[RecvRef] = deque()
        """those whose Recv is gone: its end, in any thread, only appends to this queue"""
        self.untold: dict[int, None] = {}
        """those of which the sender does not know yet that they are over"""

    def look_for_dead(self) -> None:
        """Move what is over from `alive` to `untold`."""
        while self.dead:
            try:
                ref = self.dead[0]
                self.ended(ref.n)
                self.dead.remove(ref)  # last: a signal handler may raise after each call
            except (IndexError, ValueError):  # another thread has taken it
                continue

    def ended(self, n: int) -> None:
        """An edge is over, unless it was released early before."""
        if n in self.alive:
            self.untold[n] = None  # first: a signal handler may raise after the other
            self.alive.pop(n, None)


_open: dict[Edges, None] = {}
"""those of all workers of this process"""


def any_received() -> bool:
    """Whether a worker of this process has a Recv: then engine runs are prepared."""
    for edges in tuple(_open):  # noqa: SIM110  (half the time of a generator)
        if edges.has_recvs():
            return True
    return False


@final
class Edges:
    """What one worker has sent and received that is alive."""

    def __init__(self, me: WorkerId, first: int, most: int, lock: threading.RLock) -> None:
        self.me, self.lock = me, lock
        """the lock is the worker's; see Note [Edges are not locked]"""
        self.sent: dict[int, Sent] = {}
        """by number; holds the token of the Send, and with it the graph behind the Send"""
        self.from_peers: dict[WorkerId, FromPeer] = {}
        self.joins: list[Join] = []
        self.lost_to: dict[int, WorkerId] = {}
        """of the latest edges that were dropped because their receiver was lost: that receiver"""
        self._first = self._next = first
        self.latest_depth = 0
        """of the edges sent since the last pass"""
        self._most = most
        self._counting = threading.RLock()
        _open[self] = None

    def next_edge(self) -> EdgeId:
        """A new edge; its number is not used again, whatever becomes of it."""
        with self._counting:  # no calls in here, see docs/threads.md
            n = self._next
            self._next = n + 1  # one step
        return EdgeId(self.me, n)

    def has_sent(self, n: int) -> bool:
        """Whether an edge of this number was made, by this incarnation."""
        return self._first <= n < self._next

    def sends_in(
        self, mine: Lineage, others: Iterable[WorkerId], name: Callable[[WorkerId], str]
    ) -> list[Sent]:
        """The Sent of each of these edges; PeerLost if one was released.

        For the error, `others` are the workers of the pass that are known here.
        """
        found = []
        for n in numbers(mine):
            sent = self.sent.get(n)
            if sent is None:
                raise self._released(EdgeId(self.me, n), others, name)
            found.append(sent)
        return found

    def _released(
        self, edge: EdgeId, others: Iterable[WorkerId], name: Callable[[WorkerId], str]
    ) -> PeerLost:
        again, peer = "compute what depends on it again", self.lost_to.get(edge.n)
        if peer is not None:
            lost = PeerLost(f"{edge} was dropped here: {name(peer)} was lost", hint=again)
            return lost.about(name(peer), phase="backward")
        # Whoever received it holds it no more, perhaps because that worker has lost another one.
        who = " or ".join(map(name, sorted(others))) or "a worker of this graph"
        why = f"{who} was lost, or has lost another, or the context of this edge is closed"
        return PeerLost(f"{edge} was dropped here: {why}", hint=again).about("", phase="backward")

    def next_depth(self, below: int) -> int:
        """The depth of a new edge; the deepest that it depends on has the depth `below`.

        Also deeper than those sent since the last pass: see Note [The order of waiting], walk.py.
        """
        depth = self.latest_depth = max(min(self.latest_depth, _DEEP), below) + 1
        return depth

    def came_from(self, sender: WorkerId) -> FromPeer:
        """The table of this sender."""
        # One step for the interpreter: another thread may have added it.
        return self.from_peers.get(sender) or self.from_peers.setdefault(sender, FromPeer())

    def arrived(self, end: EdgeEnd, node: Node) -> None:
        """A Recv was made. OverLimit if its sender has too many here that are alive."""
        table, n = self.came_from(end.peer), end.edge.n
        if len(table.alive) >= self._most:
            table.look_for_dead()
        if len(table.alive) >= self._most:
            raise over("edges", self._most)
        sign = node.sign_of_life = numpy.empty(0)  # type: ignore[attr-defined]
        ref = RecvRef(sign, table.dead.append)
        ref.n, ref.node = n, weakref.ref(node)
        table.alive[n] = ref

    def is_alive(self, edge: EdgeId) -> bool:
        """Whether the Recv of an edge is alive, and its sender was not lost."""
        table = self.from_peers.get(edge.worker)
        return table is not None and edge.n in table.alive

    def unseen(self, edges: Iterable[EdgeId], sender: WorkerId) -> None:
        """A message with these edges was dropped before they became Recvs.

        A sender cannot release edges of others by this, nor edges that are alive here.
        """
        table = self.came_from(sender)
        for edge in edges:
            if edge.worker == sender and edge.n not in table.alive:
                table.untold[edge.n] = None

    def has_recvs(self) -> bool:
        """Whether a Recv is alive here."""
        for table in tuple(self.from_peers.values()):  # noqa: SIM110  (as above)
            if table.alive:
                return True
        return False

    @property
    def received(self) -> dict[EdgeId, RecvRef]:
        """Every edge whose Recv is alive."""
        tables = tuple(self.from_peers.items())
        return {EdgeId(peer, n): ref for peer, own in tables for n, ref in own.alive.copy().items()}

    def recvs(self) -> list[Node]:
        """Every Recv that is alive, except those that a finalizer has brought back to life."""
        alive = [ref.node() for ref in self.received.values()]
        return [node for node in alive if node is not None]

    @property
    def to_tell(self) -> list[WorkerId]:
        """The senders that have not been told that edges of theirs are over."""
        found = []
        for sender, table in tuple(self.from_peers.items()):
            table.look_for_dead()
            if table.untold:
                found.append(sender)
        return found

    def to_release(self, sender: WorkerId, most: int) -> list[int]:
        """Edges of this sender that nobody can differentiate through any more.

        They stay queued until `was_told`; to tell twice is harmless. hot: each call and answer
        """
        table = self.from_peers.get(sender)
        if table is None:
            return []
        if table.dead:
            table.look_for_dead()
        return list(table.untold)[:most]  # in one step: others add to it and take from it

    def was_told(self, sender: WorkerId, numbers: Iterable[int]) -> None:
        """A message with these has left for their sender."""
        untold = self.came_from(sender).untold
        for n in numbers:
            untold.pop(n, None)

    def release(self, numbers: Iterable[int], by: WorkerId) -> list[object]:
        """The receiver holds these no more. Returns what to drop, with no lock held: graphs die.

        An edge that is not there was withdrawn, or released before, or by an earlier incarnation.
        BadMessage, and nothing is released, if one leads elsewhere or never left.
        """
        found = []
        for n in numbers:
            sent = self.sent.get(n)
            if sent is not None:
                if sent.peer != by:
                    raise BadMessage(f"w{by} releases {sent.edge}, which leads to another worker")
                found.append(n)
            elif n >= self._next:
                raise BadMessage(f"w{by} releases edge {n}, which never left here")
        return self._dropped(found) if found else []

    def withdraw(self, edges: Iterable[EdgeId]) -> None:
        """The message of these edges never left."""
        self._dropped([edge.n for edge in edges])

    def release_early(self, sent: Iterable[int], received: Iterable[EdgeId]) -> list[object]:
        """The end of a context: release what was sent and received in it; returns what to drop.

        The sender of each edge is told, although it closes the context too: it may have closed it
        earlier, when it lost the opener. Then the edge belongs to the context only here.
        """
        for edge in received:
            self.came_from(edge.worker).ended(edge.n)
        return self._dropped(sent)

    def peer_lost(self, peer: WorkerId) -> list[object]:
        """It holds nothing of ours any more, and what it has sent leads nowhere."""
        self.from_peers.pop(peer, None)
        lost = [n for n, sent in tuple(self.sent.items()) if sent.peer == peer]
        known = [*self.lost_to.items(), *[(n, peer) for n in lost]]
        self.lost_to = dict(known[-_LOST_REMEMBERED:])
        return self._dropped(lost)

    def clear(self) -> list[object]:
        """This worker shuts down."""
        _open.pop(self, None)
        self.from_peers.clear()
        return self._dropped(tuple(self.sent))

    def _dropped(self, numbers: Iterable[int]) -> list[object]:
        dropped: list[Any] = list(filter(None, map(self.sent.pop, numbers, repeat(None))))
        if dropped and self.joins:
            edges = union([one(sent.edge) for sent in dropped])
            dropped += [join for join in self.joins if meets(join.edges, edges)]
            self.joins = [join for join in self.joins if not meets(join.edges, edges)]
        if not self.sent:
            self.latest_depth = 0
            self.joins = []  # two threads that ran this at once may have restored one
        return dropped
