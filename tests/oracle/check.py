"""One program, both worlds, one verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.oracle import interpreter, outcome, state
from tests.oracle.compare import EXACT, difference
from tests.oracle.programs import FEATURES, draw


def exposed() -> list:
    """What the workers of an oracle run must expose."""
    return [interpreter, outcome, state]


class Checker:
    """Checks programs on a running cluster, and counts what they used.

    `together` says that its workers have the manner `edge_per_message`.
    """

    def __init__(self, on_w0: Callable, *, together: bool = False) -> None:
        self._on_w0, self._together = on_w0, together
        self.features: Counter = Counter()
        self.skipped = 0

    def failure(self, seed: int) -> str | None:
        """What is wrong with the program of this seed, in words; None if nothing is."""
        program = draw(seed)
        local = outcome.run_local(program, self._together)
        if local.largest() >= EXACT:
            self.skipped += 1  # sums would depend on their order
            return None
        self.features += program.features
        try:
            remote = self._on_w0(outcome.run_remote, program)
        except Exception as error:
            return f"{program}: {type(error).__name__}: {error}"
        found = difference(remote, local)
        return None if found is None else f"{program}: {found}"

    def never_drawn(self) -> list[str]:
        """The features that no checked program has used."""
        return [feature for feature in FEATURES if not self.features[feature]]
