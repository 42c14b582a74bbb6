"""One round of the kill loop: a step is begun, one worker dies at one point of it, the others must
say so, leave nothing, and be exact in the next step, without it and with its next incarnation.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gradwire import Options, Timeouts
from gradwire.agent.peers.secret import write_secret
from tests.kills import far
from tests.leftovers import eventually
from tests.mates import Gone, Mate, Raised

NAMES = ("w0", "w1", "w2")
ROLES = {"w0": "root", "w1": "middle", "w2": "leaf"}
WEIGHTS = {"w0": 2.0, "w1": 3.0, "w2": 5.0}
FACTOR = 3.0
TIMEOUTS = Timeouts(join=30, connect=5, call=20, backward=20, step=20, shutdown=10)
PROMISED = 2.0
"""Seconds after which the others should know who died."""
NOTICED = 15.0
"""Seconds after which a round fails: a machine that is busy is not a fault of ours."""
_DYING = 5.0
_ASYNCHRONOUS = ("Fork", "Counted", "Accept", "Drop", "Done", "Forget", "PassEnded")


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Death:
    """Who dies where."""

    victim: str
    phase: str
    point: str
    nth: int

    def __str__(self) -> str:
        role = ROLES[self.victim]
        return f"{role} ({self.victim}) in {self.phase}, {self.point} nth {self.nth}"


@dataclass
class Tally:
    """What the rounds have shown."""

    rounds: int = 0
    survived: int = 0
    """steps that were over for the others when the victim died, and exact"""
    missed: int = 0
    late: int = 0
    slowest: float = 0.0
    errors: Counter = field(default_factory=Counter)
    points: set = field(default_factory=set)


class Loop:
    """Three workers of an open world, one of which dies in each round and comes back."""

    def __init__(self, seed: int, listen: str = "unix") -> None:
        self.random = random.Random(seed)
        self.tally = Tally()
        self._listen = listen
        self._directory = tempfile.TemporaryDirectory(prefix="gradwire-kills-")
        self._mates: dict[str, Mate] = {}

    def __enter__(self) -> Loop:
        self._options = Options(
            init_method=f"file://{self._directory.name}/meeting",
            is_open=True,
            listen=self._listen,
            secret=write_secret(Path(self._directory.name) / "secret"),
            timeouts=TIMEOUTS,
        )
        self.start_over()
        self.points = self._points()
        return self

    def __exit__(self, *_) -> None:
        self._end_all()
        self._directory.cleanup()

    def start_over(self) -> None:
        """All of them anew."""
        self._end_all()
        for name in NAMES:
            self._start(name)

    def _end_all(self) -> None:
        for mate in self._mates.values():
            mate.end()
        self._mates.clear()

    def _start(self, name: str) -> None:
        if name in self._mates:
            self._mates.pop(name).end()
        mate = self._mates[name] = Mate(name)
        mate.do(far.join, name, NAMES.index(name), self._options)

    # -- what can be met

    def _points(self) -> list[tuple[str, str, str, int]]:
        """Each point of each worker in each phase of a step that nothing disturbs."""
        for name in NAMES:
            self._mates[name].do(far.arm)
        self._prepare(NAMES)
        met = []
        before = self._seen()
        for phase in far.PHASES:
            self._mates["w0"].do(*self._command(phase))
            now = self._seen()
            for name in NAMES:
                new = Counter(now[name]) - Counter(before[name])
                met += [(name, phase, point, count) for point, count in sorted(new.items())]
            before = now
        for name in NAMES:
            self._mates[name].do(far.disarm)
        return met

    def _seen(self) -> dict[str, dict[str, int]]:
        """When nothing more happens."""
        last: list = [None]

        def is_quiet() -> bool:
            found = {name: self._mates[name].do(far.seen) for name in NAMES}
            before, last[0] = last[0], found
            time.sleep(0.05)
            return found == before

        assert eventually(is_quiet, 10)
        return last[0]

    def deaths(self):
        """All of them in a random order, again and again."""
        while True:
            order = list(self.points)
            self.random.shuffle(order)
            for victim, phase, point, count in order:
                is_certain = point.split()[1] not in _ASYNCHRONOUS
                nth = self.random.randint(1, count) if is_certain else 1
                yield Death(victim, phase, point, nth)

    # -- a round

    def round(self, death: Death) -> None:
        """Raises Violation if a promise is broken."""
        victim = self._mates[death.victim]
        others = [name for name in NAMES if name != death.victim]
        self._prepare(NAMES)
        error, context = self._step(death)
        began = time.monotonic()
        if not victim.died_by(signal.SIGKILL, _DYING):
            self.tally.missed += 1
            raise Violation("the fault never happened")
        waited = time.monotonic() - began
        if death.victim != "w0":
            self._check_outcome(death, error, context, waited)
        self._check_clean(others)
        self._check_exact(others)
        self._start(death.victim)
        self._check_exact(NAMES)
        self.tally.rounds += 1
        self.tally.points.add((death.victim, death.phase, death.point))

    def _prepare(self, route) -> None:
        for name in route:
            self._mates[name].do(far.reset, WEIGHTS[name])
        self._mates[route[0]].do(far.build, list(route[1:]))

    def _command(self, phase: str):
        return (far.forward, 1) if phase == "forward" else (getattr(far, phase),)

    def _step(self, death: Death) -> tuple[Raised | None, int | None]:
        """What the root says of a step in which somebody dies, and the context if it had one."""
        root, context = self._mates["w0"], None
        try:
            for phase in far.PHASES:
                if phase == death.phase:
                    self._arm(death)
                began = time.monotonic()
                try:
                    said = root.do(*self._command(phase))
                except Raised as error:
                    self._note(error, time.monotonic() - began)
                    return error, context
                context = said if phase == "backward" else context
        except Gone:
            if death.victim != "w0":
                raise Violation(f"the root died, and not {death.victim}") from None
        return None, context

    def _arm(self, death: Death) -> None:
        victim = self._mates[death.victim]
        with suppress(Gone):  # what was on its way has met the point already
            victim.do(far.arm, f"kill {death.point} nth {death.nth}")

    def _note(self, error: Raised, seconds: float) -> None:
        self.tally.errors[error.type_name] += 1
        self.tally.slowest = max(self.tally.slowest, seconds)
        self.tally.late += seconds > PROMISED
        if seconds > NOTICED:
            raise Violation(f"it took {seconds:.1f} s to hear: {error}")

    # -- what must hold

    def _check_outcome(self, death: Death, error, context, waited: float) -> None:
        after = {n: WEIGHTS[n] - far.LR * g for n, g in expected(NAMES).items()}
        others = [name for name in NAMES if name != death.victim]
        weights = {name: self._mates[name].do(far.weight) for name in others}
        if error is None:
            self.tally.survived += 1
            if weights != {name: after[name] for name in others}:
                raise Violation(f"a step that succeeded has left {weights}")
        else:
            if death.victim not in error.text:
                raise Violation(f"the victim is not named: {error}")
            committing = error.type_name == "StepFailed" and "have stepped" in error.text
            for name, found in weights.items():
                may = {WEIGHTS[name], after[name]} if committing else {WEIGHTS[name]}
                if found not in may:
                    raise Violation(f"{name} has weight {found} after {error}")
            self._mates["w0"].do(far.release)
        strays = {name: self._mates[name].do(far.stray_gradient) for name in others}
        if any(value is not None for value in strays.values()):
            raise Violation(f"gradients were left: {strays}")

    def _check_clean(self, names) -> None:
        found: dict = {}

        def is_clean() -> bool:
            found.update({name: self._mates[name].do(far.leftovers) for name in names})
            return not any(n for counts in found.values() for n in counts.values())

        if not eventually(is_clean, 10):
            left = {name: {w: n for w, n in counts.items() if n} for name, counts in found.items()}
            raise Violation(f"left behind: {left}")

    def _check_exact(self, route) -> None:
        """A whole step over these workers gives what arithmetic says."""
        self._prepare(route)
        root = self._mates[route[0]]
        root.do(far.forward, 1)
        context = root.do(far.backward)
        right = expected(route)
        found = {name: self._mates[name].do(far.gradient, context) for name in route}
        if found != right:
            raise Violation(f"gradients {found} instead of {right}")
        root.do(far.step)
        root.do(far.release)
        weights = {name: self._mates[name].do(far.weight) for name in route}
        stepped = {name: WEIGHTS[name] - far.LR * right[name] for name in route}
        if weights != stepped:
            raise Violation(f"weights {weights} instead of {stepped}")

    def footprints(self) -> dict[str, dict[str, int]]:
        return {name: mate.do(far.footprint) for name, mate in self._mates.items()}


def expected(route) -> dict[str, float]:
    """The gradient of each weight of a chain: the product of all the others."""
    whole = FACTOR
    for name in route:
        whole *= WEIGHTS[name]
    return {name: whole / WEIGHTS[name] for name in route}
