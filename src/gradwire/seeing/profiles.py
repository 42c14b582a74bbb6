"""torch's own profile of a worker, for a trace with `torch=True`.

torch profiles a process, so of several workers in one process the first that is asked does it. The
profile is begun and ended on a thread of its own, as torch wants both on one thread.
"""

from __future__ import annotations

import gzip
import tempfile
import threading
import time
from pathlib import Path
from typing import Final, final

import msgspec

from gradwire import threads
from gradwire.current import ProcessValue
from gradwire.errors import UsageError
from gradwire.torch_private import is_profiled, new_profile

_SECONDS: Final = 60.0
"""to begin, and to write what was profiled"""
_running = ProcessValue["TorchProfile"]()
_begins = threading.RLock()


@final
class TorchProfile:
    """A profile of this process that is being taken."""

    def __init__(self, worker: str, rank: int, world_size: int) -> None:
        self._about = {"rank": rank, "world_size": world_size, "backend": "gradwire"}
        self._begun, self._over, self._written = (threading.Event() for _ in range(3))
        self._result = b""
        self.ahead = 0
        """nanoseconds by which the clock of the profile is ahead of that of the events"""
        self.failure = ""
        """why there is no profile"""
        threads.thread(f"gradwire {worker} profile", self._run).start()
        self._begun.wait(_SECONDS)

    def stop(self) -> bytes:
        """End it; the file that torch writes, compressed."""
        self._over.set()
        if not self._written.wait(_SECONDS):
            self.failure = f"torch did not write its profile within {_SECONDS:g} s"
        if _running.value is self:
            _running.value = None
        return self._result

    def _run(self) -> None:
        try:
            if is_profiled():  # torch would crash
                raise UsageError("this process takes a profile already")
            profile = new_profile()
            profile.start()
            self.ahead = time.time_ns() - time.monotonic_ns()
            self._begun.set()
            self._over.wait()
            profile.add_metadata_json("distributedInfo", msgspec.json.encode(self._about).decode())
            profile.stop()
            with tempfile.TemporaryDirectory(prefix="gradwire-profile-") as directory:
                file = Path(directory) / "profile.json"
                profile.export_chrome_trace(str(file))
                self._result = gzip.compress(file.read_bytes(), 5)
        except Exception as error:  # torch refuses if the user profiles already
            self.failure = f"torch's profiler: {error}"
        finally:
            self._begun.set()
            self._written.set()


def begin_profile(worker: str, rank: int, world_size: int) -> TorchProfile | None:
    """Begin the profile of this process; None if another worker in it has begun one."""
    with _begins:
        if _running.value is not None:
            return None
        profile = _running.value = TorchProfile(worker, rank, world_size)
    return profile
