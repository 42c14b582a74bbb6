"""What the workers of a random hour run: the steps of the kill loop, one after another, timed."""

from __future__ import annotations

import time

import gradwire
from gradwire.current import current_worker
from tests.injection import proxy
from tests.kills import far

redirect = proxy.redirect


def address() -> str:
    return current_worker.find().directory.myself.address


def train(route, most):
    """Up to so many steps, until one fails: of each phase how long it took, and how it ended."""
    said = []
    for _ in range(most):
        for phase, fn, args in _phases(route):
            began = time.monotonic()
            try:
                fn(*args)
                error = None
            except gradwire.GradwireError as caught:
                error = f"{type(caught).__name__}: {caught}"
            said.append((phase, time.monotonic() - began, error))
            if error is not None:
                said.append(_timed_release())
                return said
    return said


def _phases(route):
    yield "build", far.build, (route,)
    yield "forward", far.forward, (1,)
    yield "backward", far.backward, ()
    yield "step", far.step, ()
    yield "release", far.release, ()


def _timed_release():
    began = time.monotonic()
    far.release()
    return ("release", time.monotonic() - began, None)
