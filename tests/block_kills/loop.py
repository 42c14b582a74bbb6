"""One round: one of two workers dies in a state of a block, and the other must say so, keep none of
its blocks, and be exact with the next incarnation.
"""

from __future__ import annotations

import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gradwire import Options, Timeouts
from gradwire.agent.peers.secret import write_secret
from tests.block_kills import far
from tests.leftovers import eventually
from tests.mates import Gone, Mate, Raised

NAMES = ("w0", "w1")
TIMEOUTS = Timeouts(join=60, connect=5, call=20, backward=20, step=20, shutdown=10)
PROMISED = 2.0
_SLACK = 8 << 20
"""bytes by which the memory in use may differ: contexts of new processes are not all alike"""


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Death:
    """Who dies where, in the two exchanges of a round."""

    victim: str
    point: str
    nth: int

    @property
    def is_of_a_new_block(self) -> bool:
        return self.point.split()[1] in far.ONCE


class Loop:
    """Two workers of an open world, one of which dies in each round and comes back."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._directory = tempfile.TemporaryDirectory(prefix="gradwire-blocks-")
        self._mates: dict[str, Mate] = {}
        self.slowest = 0.0

    def __enter__(self) -> Loop:
        self._options = Options(
            init_method=f"file://{self._directory.name}/meeting",
            is_open=True,
            secret=write_secret(Path(self._directory.name) / "secret"),
            timeouts=TIMEOUTS,
        )
        self.start_over()
        return self

    def __exit__(self, *_) -> None:
        for mate in self._mates.values():
            mate.end()
        self._directory.cleanup()

    def start_over(self) -> None:
        """Both anew."""
        for name in NAMES:
            self._start(name)
        self.deaths = [death for death in self._met() if death.is_of_a_new_block]
        self.deaths += [death for death in self._met() if not death.is_of_a_new_block]
        self._usual = {name: self._mates[name].do(far.memory_in_use) for name in NAMES}

    def _met(self) -> list[Death]:
        """Each point that the workers meet in two exchanges."""
        for name in NAMES:
            self._mates[name].do(far.arm)
        self._check_exact()
        return [
            Death(name, point, nth)
            for name in NAMES
            for point, count in sorted(self._mates[name].do(far.met).items())
            for nth in range(1, count + 1)
        ]

    def _start(self, name: str) -> None:
        if name in self._mates:
            self._mates.pop(name).end()
        mate = self._mates[name] = Mate(name)
        mate.do(far.join, name, NAMES.index(name), self._options, self._device)

    def round(self, death: Death) -> None:
        """Raises Violation if a promise is broken."""
        if death.is_of_a_new_block:
            self._start(death.victim)  # it has no blocks yet
        victim = self._mates[death.victim]
        (other,) = set(NAMES) - {death.victim}
        victim.do(far.arm, death.point, death.nth)
        began = time.monotonic()
        try:
            self._check_exact()
        except Raised as error:
            if death.victim not in error.text:
                raise Violation(f"the victim is not named: {error}") from error
        except Gone:
            if death.victim != "w0":
                raise Violation("w0 died, and not the victim") from None
        if not victim.died_by(signal.SIGKILL, 5):
            raise Violation("it did not die")
        if not eventually(lambda: not self._mates[other].do(far.lanes_left), 10):
            raise Violation(f"{other} keeps blocks")
        self.slowest = max(self.slowest, time.monotonic() - began)
        if self.slowest > 15:
            raise Violation("it took too long")
        self._start(death.victim)
        self._check_exact()
        used = self._mates[other].do(far.memory_in_use)
        if abs(used - self._usual[other]) > _SLACK:
            raise Violation(f"{used} bytes are in use, and {self._usual[other]} were before")

    def _check_exact(self) -> None:
        for value in (1.0, 5.0):
            said = self._mates["w0"].do(far.exchange, "w1", value, seconds=15)
            if said != ([2 * value], [6.0]):
                raise Violation(f"{said} instead of {2 * value} and 6.0")
