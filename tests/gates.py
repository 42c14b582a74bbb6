"""Events that served functions wait for, so that a test decides when they go on."""

from __future__ import annotations

import threading

GATES: dict[str, threading.Event] = {}
"""By the name of the test; the workers of a process share it."""
