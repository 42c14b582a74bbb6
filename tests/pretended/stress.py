"""The random programs of tests/streams on pretended devices, which reorder work on purpose."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from gradwire.testing.cluster import Cluster, cluster
from gradwire.testing.pretend import streams
from gradwire.testing.pretend.driver import PretendDriver
from gradwire.testing.pretend.tensors import install, put
from tests.streams.program import EXPOSED, Program

install()
DEVICE = torch.device("pretend:0")


class Pretended:
    """The first pretended device."""

    def put(self, values: torch.Tensor) -> torch.Tensor:
        return put(values, DEVICE)

    def new_stream(self) -> streams.Stream:
        return streams.Stream(DEVICE)

    def current_stream(self) -> streams.Stream:
        return streams.current_stream(DEVICE)

    def use_stream(self, stream: streams.Stream) -> AbstractContextManager[None]:
        return streams.use_stream(stream)

    def delay(self, dice: random.Random) -> None:
        """These streams are late anyway."""


@contextmanager
def workers(n: int = 3, **settings) -> Iterator[Cluster]:
    driver = PretendDriver(**settings)
    with cluster(n, expose=EXPOSED, drivers=lambda kind: driver) as made:
        yield made


def play(seeds: range, **settings) -> list[int]:
    """The seeds whose programs differ."""
    wrong = []
    with workers(**settings) as made:
        for seed in seeds:
            streams.shuffle(seed)
            try:
                made[0].run(lambda seed=seed: Program(seed, Pretended(), ["w1", "w2"]).run())
            except AssertionError:
                wrong.append(seed)
            streams.synchronize()
    return wrong
