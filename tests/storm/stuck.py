"""What all workers of a storm do while one of them waits too long: their stacks and channels.

The thread that watches takes no lock of the worker, so it reports even if all others are stuck.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from pathlib import Path

from gradwire.current import current_worker
from tests.storm import forks

PATIENCE = 7.0
"""Seconds that one wait takes before all workers report; its deadline comes later."""

_waits: dict[object, float] = {}


class Wait:
    """A wait, from its beginning to its end."""

    def __enter__(self) -> Wait:
        _waits[self] = time.monotonic()
        return self

    def __exit__(self, *_) -> None:
        _waits.pop(self, None)


def watch(directory: str, name: str) -> None:
    """Report once, when a wait of any of the workers takes long."""
    sign = Path(directory) / "stuck"

    def main() -> None:
        while forks.is_original():
            time.sleep(0.5)
            longest = time.monotonic() - min([*_waits.values()], default=float("inf"))
            if longest > PATIENCE:
                sign.touch()
            if sign.exists():
                _report(name, longest)
                return

    threading.Thread(target=main, name="stuck", daemon=True).start()


def _report(name: str, longest: float) -> None:
    faulthandler.dump_traceback(all_threads=True)
    lines = [f"{name}: the longest wait: {longest:.1f} s"]
    worker = current_worker.find()
    if worker is not None:
        connections = worker.agent._connections
        for peer, channels in connections.channels.items():
            for channel in channels:
                parts = (getattr(channel, "_reader", None), getattr(channel, "_writer", None))
                lines += [f"channel to {peer}: {channel!r}", *map(_state, parts)]
        readers = connections.readers.all()
        lines += [f"reader of {reader.worker}: {_state(reader)}" for reader in readers]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _state(part: object) -> str:
    names = getattr(part, "__dict__", None) or {
        name: getattr(part, name, None) for name in getattr(type(part), "__slots__", ())
    }
    return ", ".join(f"{name}={value!r:.80}" for name, value in dict(names).items())
