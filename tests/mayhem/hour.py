"""Workers that are killed, frozen and cut off at random while they train.

Whatever happens, every phase of a step ends by its deadline and a little; an error names a worker;
and once nothing is wrong any more, the next steps are exact.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

from gradwire import Options, Timeouts
from gradwire.agent.peers.secret import write_secret
from tests.injection import processes
from tests.injection.proxy import FaultProxy, Way
from tests.kills import far as steps
from tests.kills.loop import NAMES, WEIGHTS, Violation, expected
from tests.mates import Gone, Mate, Raised
from tests.mayhem import far

DEADLINE = 2.0
TIMEOUTS = Timeouts(
    join=20, connect=DEADLINE, call=DEADLINE, backward=DEADLINE, step=DEADLINE, stall=DEADLINE
)
WAITS = {"build": 3, "forward": 3, "backward": 1, "step": 1, "release": 1}
"""How many deadlines a phase may take, one after the other."""
SLACK = 2.0
KINDS = ("kill", "freeze", "cut", "reset", "stall", "slow")
STEPS = 8


class Hour:
    """Three workers with a proxy for each direction of dialling, and who torments them."""

    def __init__(self, seed: int, kinds=KINDS) -> None:
        self.random = random.Random(seed)
        self.kinds = kinds
        self.faults: Counter = Counter()
        self.endings: Counter = Counter()
        self.samples: dict[str, str] = {}
        """the first error of each kind"""
        self.late: list[str] = []
        self.slowest = 0.0
        self._stack = ExitStack()
        self._mates: dict[str, Mate] = {}
        self._links: dict[tuple[str, str], FaultProxy] = {}

    def __enter__(self) -> Hour:
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-hour-"))
        self._options = Options(
            init_method=f"file://{directory}/meeting",
            is_open=True,
            listen="tcp://127.0.0.1:0",
            secret=write_secret(Path(directory) / "secret"),
            timeouts=TIMEOUTS,
        )
        self._stack.callback(self._end_all)
        for name in NAMES:
            self._start(name)
        for name in NAMES:
            self._link(name)
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def _start(self, name: str) -> None:
        if name in self._mates:
            self._mates.pop(name).end()
        mate = self._mates[name] = Mate(name)
        mate.do(steps.join, name, NAMES.index(name), self._options)

    def _end_all(self) -> None:
        for mate in self._mates.values():
            with suppress(ProcessLookupError):
                processes.thaw(mate.pid)
            mate.end()
        for proxy in self._links.values():
            proxy.__exit__()

    def _link(self, name: str) -> None:
        """Everybody dials it, and it dials everybody, through proxies of their own."""
        for near, far_end in [(name, other) for other in NAMES if other != name] + [
            (other, name) for other in NAMES if other != name
        ]:
            old = self._links.pop((near, far_end), None)
            if old is not None:
                old.__exit__()
            target = self._mates[far_end].do(far.address)
            proxy = FaultProxy(target, seed=self.random.randrange(1 << 30)).__enter__()
            self._links[near, far_end] = proxy
            self._mates[near].do(far.redirect, far_end, proxy.address)

    # -- one episode

    def episode(self) -> None:
        """Some steps with one fault in the middle of them; then all is well again."""
        for name in NAMES:
            self._mates[name].do(steps.reset, WEIGHTS[name])
        kind = self.random.choice(self.kinds)
        victim = self.random.choice(NAMES)
        root = self._mates["w0"]
        root.begin(far.train, ["w1", "w2"], STEPS)
        time.sleep(self.random.uniform(0, 0.25))
        undo = self._harm(kind, victim)
        self.faults[kind] += 1
        excused = victim == "w0" and kind in ("kill", "freeze")
        try:
            if excused and kind == "freeze":
                time.sleep(self.random.uniform(0.01, 1.5 * DEADLINE))
                undo()
            self._judge(root.finish(), excused, f"{kind} of {victim}")
        except Gone:
            if (kind, victim) != ("kill", "w0"):
                raise Violation(f"the root died of {kind} of {victim}") from None
            self.endings["root killed"] += 1
        undo()
        if kind == "kill":
            self._mates[victim].died_by(9, 5)
            self._start(victim)
            self._link(victim)
        self._calm(f"{kind} of {victim}")

    def _harm(self, kind: str, victim: str):
        mate = self._mates[victim]
        other = self.random.choice([name for name in NAMES if name != victim])
        links = [self._links[victim, other], self._links[other, victim]]
        if kind == "kill":
            processes.kill(mate)
        elif kind == "freeze":
            processes.freeze(mate)
            return lambda: processes.thaw(mate)
        elif kind == "slow":
            for link in links:
                link.slow(self.random.choice([2e3, 2e4, 2e5]))
        elif kind == "stall":
            way = self.random.choice([None, *Way])
            for link in links:
                link.stall(way)
        else:
            for link in links:
                getattr(link, kind)()
        return lambda: [link.heal() for link in links]

    def _judge(self, said, excused: bool, what: str) -> None:
        for phase, seconds, error in said:
            self.slowest = max(self.slowest, 0.0 if excused else seconds)
            if seconds > WAITS[phase] * DEADLINE + SLACK and not excused:
                self.late.append(f"{phase} took {seconds:.1f} s after {what}: {error}")
            if error is not None:
                kind = error.partition(":")[0]
                self.endings[kind] += 1
                self.samples.setdefault(kind, f"{phase}, {what}: {error.splitlines()[0]}")
                if not any(name in error for name in NAMES):
                    raise Violation(f"nobody is named after {what}: {error}")
        if all(error is None for _, _, error in said):
            self.endings["exact"] += 1

    def _calm(self, what: str) -> None:
        """Connections that were given up are made again; soon a step is exact."""
        until, last = time.monotonic() + 30, None
        while time.monotonic() < until:
            for name in NAMES:
                self._mates[name].do(steps.reset, WEIGHTS[name])
            said = self._mates["w0"].do(far.train, ["w1", "w2"], 1)
            last = said[-1][2] or next((error for _, _, error in said if error), None)
            if last is None:
                right = {n: WEIGHTS[n] - steps.LR * g for n, g in expected(NAMES).items()}
                found = {name: self._mates[name].do(steps.weight) for name in NAMES}
                if found != right:
                    raise Violation(f"weights {found} instead of {right} after {what}")
                return
        raise Violation(f"no step succeeds after {what}: {last}")

    def leftovers(self) -> dict:
        """What is left on each worker once it has had time to forget.

        A word about a reference that was lost with its link is said again after 30 s.
        """
        until = time.monotonic() + 60
        while True:
            found = {name: mate.do(steps.leftovers) for name, mate in self._mates.items()}
            left = {name: {w: n for w, n in one.items() if n} for name, one in found.items()}
            if not any(left.values()) or time.monotonic() > until:
                return {name: one for name, one in left.items() if one}
            time.sleep(0.05)

    def footprints(self) -> dict:
        return {name: mate.do(steps.footprint) for name, mate in self._mates.items()}


__all__ = ["KINDS", "Hour", "Raised", "Violation"]
