"""Counts: what one worker has done until now, and what it holds at this moment.

Read from states that count for themselves, so that a call pays a few additions and no lock. What
ever grows (`made`, `traffic`, …) counts each thing once and survives reconnections; it is kept by
the number of a peer, so an open world's next worker of that number continues it. Only names and
numbers: a `Counts` may leave the worker.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from gradwire.agent.peers.directory import Directory
from gradwire.agent.requests.ends import Tally
from gradwire.ids import WorkerId
from gradwire.optim.shard import OptimizerHost
from gradwire.rpc.worker import Worker

ByPeer = dict[str, int]

MOST_PEERS = 1000
"""Peers that are named; what belongs to others is summed under OTHER."""
OTHER = "other"


class Carried(msgspec.Struct, frozen=True):
    """The bytes that went between this worker and a peer by one way.

    The ways are shm, unix, tcp, tls, memory and device.
    """

    peer: str
    way: str
    sent: int
    received: int


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker has done, and holds. Durations are in seconds."""

    worker: str
    life: int
    """its incarnation"""
    # since it began
    made: dict[str, ByPeer]
    """its calls that have ended: answered, raised, late, cancelled, lost or unsent, then by peer"""
    served: dict[str, ByPeer]
    """calls of peers that have ended here: answered, raised or cancelled"""
    traffic: list[Carried]
    passes: dict[str, int]
    """backward passes that began here: answered or raised"""
    steps: dict[str, int]
    """optimizer steps that began here: answered or raised"""
    refused: dict[str, int]
    """requests and peers that it refused, by kind"""
    losses: ByPeer
    """how often each peer was lost"""
    restarts: int | None
    """how often this worker was started again; None in an open world, where nobody knows"""
    # now
    in_flight: int
    """requests without an answer"""
    serving: int
    """requests of peers that run or are queued"""
    oldest_wait: float
    """for how long the oldest request has had no answer; 0 if there is none"""
    references: int
    """references to values of other workers"""
    values: int
    """values here that references point to"""
    contexts: int
    live_edges: int
    active_passes: int
    shared_bytes: int
    """shared memory that it has made for peers"""
    peers: dict[str, int]
    """other workers: connected, silent (connected, and suspiciously quiet) or unconnected"""


def read_counts(worker: Worker) -> Counts:
    """Read them now. Any thread may; it takes the worker's lock for a moment, and waits for nobody.

    Made afresh each time: two reads never share a dict.
    """
    agent, engine, me = worker.agent, worker.engine, worker.directory.myself
    references, waiting = worker.refs.statistics(), agent.unanswered()
    coordinator, optimizers = engine.coordinator, worker.maybe_part(OptimizerHost)
    stepped, failed = (optimizers.stepped, optimizers.failed) if optimizers else (0, 0)
    return Counts(
        worker=worker.name,
        life=me.incarnation,
        made=_by_name(worker.directory, agent.ends.seen()),
        served=_by_name(worker.directory, agent.dispatch.served.seen()),
        traffic=_traffic(worker),
        passes={"answered": coordinator.ended, "raised": coordinator.failed},
        steps={"answered": stepped, "raised": failed},
        refused=worker.refusals.seen(),
        losses=_named(worker.directory, agent.connections.losses()),
        restarts=None if worker.directory.is_open else me.incarnation,
        in_flight=agent.in_flight,
        serving=agent.dispatch.active,
        oldest_wait=max(0.0, agent.clock.now() - waiting[0].opened) if waiting else 0.0,
        references=references.held,
        values=references.owned,
        contexts=len(engine.contexts),
        live_edges=len(engine.edges.sent),
        active_passes=len(engine.passes),
        shared_bytes=agent.connections.shared_bytes(),
        peers=_states(worker),
    )


def _by_name(directory: Directory, tallies: dict[str, Tally]) -> dict[str, ByPeer]:
    return {way: _named(directory, tally) for way, tally in tallies.items() if tally}


def _named(directory: Directory, tally: Tally) -> ByPeer:
    sums: Counter[str] = Counter()
    for peer, count in tally.items():
        sums[_label(directory, peer)] += count
    return dict(sums)


def _label(directory: Directory, peer: WorkerId) -> str:
    """The name of a peer, if its number is one of the first."""
    return directory.name(peer) if peer < MOST_PEERS else OTHER


def _traffic(worker: Worker) -> list[Carried]:
    sent: Counter[tuple[str, str]] = Counter()
    received: Counter[tuple[str, str]] = Counter()
    found = worker.agent.connections.traffic()
    found |= {(peer, "device"): both for peer, both in worker.devices.carried().items()}
    for (peer, way), (out, into) in found.items():
        label = _label(worker.directory, peer), way
        sent[label] += out
        received[label] += into
    return [Carried(*label, sent[label], received[label]) for label in sorted(sent)]


def _states(worker: Worker) -> dict[str, int]:
    states = {"connected": 0, "silent": 0, "unconnected": 0}
    silences = worker.agent.silences()
    for peer in worker.directory.others():
        if not worker.agent.is_connected(peer.id):
            states["unconnected"] += 1
        else:
            states["silent" if silences.get(peer.id) else "connected"] += 1
    return states
