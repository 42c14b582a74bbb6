"""What the workers of a cluster say to each other, for tests that count messages."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

from gradwire.testing import cluster
from gradwire.wire.message import kind_of


class _Listening:
    def __init__(self, channel, kinds):
        self._channel, self._kinds = channel, kinds

    def send(self, frame, deadline):
        self._kinds.append(frame.kind)
        self._channel.send(frame, deadline)

    def __getattr__(self, name):
        return getattr(self._channel, name)


def _use(use, kinds, worker, channel, losses=None):
    """In the place of `Connections._use`, which puts a channel to use."""
    return use(worker, _Listening(channel, kinds), losses)


class Said:
    """The messages of all workers, by the order in which they leave."""

    def __init__(self):
        self.kinds: list[int] = []
        self._names: dict[int, str] = {}

    def learn(self, kinds) -> None:
        self._names = {kind_of(kind): kind.__name__ for kind in kinds}

    def clear(self) -> None:
        self.kinds.clear()

    def names(self) -> list[str]:
        return [self._names[kind] for kind in self.kinds]


@contextmanager
def overheard(size: int, **options):
    """A cluster, and what is said in it."""
    said = Said()
    with cluster(size, **options) as workers:
        for member in workers:
            connections = member.worker.agent._connections
            connections._use = partial(_use, connections._use, said.kinds)
        said.learn(decoder.type for decoder in workers[0].worker.agent.kinds._decoders.values())
        yield workers, said
