"""Programs for the simulator that wait by themselves."""

from __future__ import annotations

import threading
import time

import gradwire


def slow():
    time.sleep(100)
    return "waited"


def patient():
    return gradwire.rpc_sync("w1", slow, timeout=200.0)


def for_ever():
    threading.Event().wait()


def timers():
    rang = []
    kept = threading.Timer(50, rang.append, ["kept"])
    cancelled = threading.Timer(20, rang.append, ["cancelled"])
    for timer in (kept, cancelled):
        timer.start()
    cancelled.cancel()
    kept.join()
    return rang
