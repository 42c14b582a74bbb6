"""One program, both worlds, one verdict."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager

from gradwire import Options
from gradwire.rpc.behavior import Behavior
from gradwire.testing import cluster
from tests.oracle import dice, interpreter, leaks, outcome, state, unusual
from tests.oracle.compare import EXACT, difference
from tests.oracle.outcome import Outcome
from tests.oracle.programs import KINDS, Program, draw, features_of

SECONDS = 60.0
"""A program that takes longer hangs: all it waits for has a shorter deadline."""


class Hung(Exception):
    """A program has not ended in time."""


def exposed() -> list:
    """What the workers of an oracle run must expose."""
    return [interpreter, leaks, outcome, state, unusual]


@contextmanager
def workers(options: Options, behavior: Behavior | None = None, *, draws: bool = True) -> Iterator:
    """A cluster in this process: five workers, and one that is lost. Gives what runs on w0."""
    with ExitStack() as stack:
        stack.enter_context(leaks.cheap_collections())
        own = stack.enter_context(dice.owned(6)) if draws else None
        made = cluster(6, expose=exposed(), options=options, behavior=behavior, generators=own)
        members = stack.enter_context(made)
        members[5].worker.close()
        yield members[0].run


class Checker:
    """Checks programs on a running cluster, and counts what they used.

    `together` says that its workers have the behavior `edge_per_message`. `unseen` is what was
    raised where nobody sees it (`leaks.unseen`), by one of the programs so far.
    """

    def __init__(
        self,
        on_w0: Callable,
        *,
        together: bool = False,
        kinds: Collection[str] = KINDS,
        seconds: float = SECONDS,
        unseen: Collection[str] = (),
    ) -> None:
        self._on_w0, self._together, self._unseen = on_w0, together, unseen
        self._kinds, self._seconds = kinds, seconds
        self.features: Counter = Counter()
        self.skipped = 0
        self.hung = False
        """whether a program has not ended, or has left something behind or raised where nobody
        sees it: nothing more can be said with this cluster"""

    def failure(self, seed: int) -> str | None:
        """What is wrong with the program of this seed, in words; None if nothing is."""
        program = draw(seed, self._kinds)
        if self.hung:
            return f"{program}: not run, an earlier program hangs"
        local = outcome.run_local(program, self._together)
        if max(act.largest() for act in local) >= EXACT:
            self.skipped += 1  # sums would depend on their order
            return None
        self.features += program.features
        try:
            remote = self._in_time(program)
        except Exception as error:
            return f"{program}: {type(error).__name__}: {error}"
        found = difference(remote, local)
        if found is not None:
            return f"{program}: {found}"
        left = self._on_w0(leaks.what_is_left, program.workers)
        if left is not None:
            self.hung = True
            return f"{program}: left behind on {left}"
        if self._unseen:
            self.hung = True
            return f"{program}, or one before: {'; '.join(self._unseen)}"
        return None

    def _in_time(self, program: Program) -> list[Outcome]:
        """What the cluster makes of it, on a thread of its own, which has made no node before."""
        outcomes: list[list[Outcome]] = []
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
