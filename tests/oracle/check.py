"""One program, both worlds, one verdict."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection

from tests.oracle import interpreter, outcome, state, unusual
from tests.oracle.compare import EXACT, difference
from tests.oracle.outcome import Outcome
from tests.oracle.programs import KINDS, Program, draw, features_of

SECONDS = 60.0
"""A program that takes longer hangs: all it waits for has a shorter deadline."""


class Hung(Exception):
    """A program has not ended in time."""


def exposed() -> list:
    """What the workers of an oracle run must expose."""
    return [interpreter, outcome, state, unusual]


class Checker:
    """Checks programs on a running cluster, and counts what they used.

    `together` says that its workers have the behavior `edge_per_message`.
    """

    def __init__(
        self,
        on_w0: Callable,
        *,
        together: bool = False,
        kinds: Collection[str] = KINDS,
        seconds: float = SECONDS,
    ) -> None:
        self._on_w0, self._together = on_w0, together
        self._kinds, self._seconds = kinds, seconds
        self.features: Counter = Counter()
        self.skipped = 0
        self.hung = False
        """whether a program has not ended: nothing more can be said with this cluster"""

    def failure(self, seed: int) -> str | None:
        """What is wrong with the program of this seed, in words; None if nothing is."""
        program = draw(seed, self._kinds)
        if self.hung:
            return f"{program}: not run, an earlier program hangs"
        local = outcome.run_local(program, self._together)
        if local.largest() >= EXACT:
            self.skipped += 1  # sums would depend on their order
            return None
        self.features += program.features
        try:
            remote = self._in_time(program)
        except Exception as error:
            return f"{program}: {type(error).__name__}: {error}"
        found = difference(remote, local)
        return None if found is None else f"{program}: {found}"

    def _in_time(self, program: Program) -> Outcome:
        """What the cluster makes of it, on a thread of its own, which has made no node before."""
        outcomes: list[Outcome] = []
        errors: list[BaseException] = []

        def main() -> None:
            try:
                outcomes.append(self._on_w0(outcome.run_remote, program))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=main, name=f"oracle {program}", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if thread.is_alive():
            self.hung = True
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
            raise Hung(f"not over after {self._seconds:g} s; the stacks are on stderr")
        if errors:
            raise errors.pop()
        return outcomes[0]

    def never_drawn(self) -> list[str]:
        """The features that no checked program has used."""
        return [feature for feature in features_of(self._kinds) if not self.features[feature]]
