"""A signal handler that raises in the middle of a call (Ctrl-C does): nothing of the call is left.

CPython runs signal handlers when a function is entered, after a call of a C function, and before a
loop goes on. A tracer raises at the first two in turn; the code of a loop has both inside.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import time
from pathlib import Path

import pytest
import torch

import gradwire as gw
from gradwire.current import current_inbound
from gradwire.testing import cluster
from tests.leftovers import eventually, flush, leftovers

HERE = sys.modules[__name__]
SOURCE = str(Path(gw.__file__).parent)
CALLS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW"}


# -- what runs on the workers


def double(x):
    return x * 2


def reference_to_double(x, _reference):
    return gw.RRef(x * 2)


def until_cancelled():
    inbound, end = current_inbound(), time.monotonic() + 20
    while not inbound.cancelled and time.monotonic() < end:
        time.sleep(0.0005)
    return bool(inbound.cancelled)


# -- raising


@functools.cache
def after_calls(code):
    """The offsets of the instructions that follow a call.

    In CPython the exception comes from the call. A return after it lies outside of a `try` around
    both, so it is left out here.
    """
    found, before = set(), ""
    for step in dis.get_instructions(code):
        if before in CALLS and step.opname != "RETURN_VALUE":
            found.add(step.offset)
        before = step.opname
    return found


def is_left_out(frame):
    """Whether this code opens a connection: an earlier interrupt has ended the one before.

    Or whether it is called by a finalizer: Python ignores what is raised there.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("links/connections.py") or code.co_name == "_came_back":
            return True
        frame = frame.f_back
    return False


class RaisingOnce:
    """Raises a KeyboardInterrupt at the first point of gradwire that is not among those `tried`."""

    def __init__(self, tried):
        self._tried = tried
        self.where = ""
        self._returned_to = None

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        self._returned_to = None

    def _trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if self.where or not name.startswith(SOURCE):
            return None
        if event == "call":
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            self._maybe_raise(frame, -1)
        elif event == "opcode":
            # Between the return of a Python function and the next instruction there is nothing.
            if frame.f_lasti in after_calls(frame.f_code) and self._returned_to is not frame:
                self._maybe_raise(frame, frame.f_lasti)
            self._returned_to = None
        elif event == "return":
            self._returned_to = frame.f_back
        return self._trace

    def _maybe_raise(self, frame, at):
        point = frame.f_code, at
        if point not in self._tried and not is_left_out(frame):
            self._tried.add(point)
            code = frame.f_code
            file = code.co_filename[len(SOURCE) + 1 :]
            self.where = f"{file}:{frame.f_lineno} {code.co_qualname}"
            raise KeyboardInterrupt


# -- what is interrupted


def a_call(_):
    gw.rpc_sync("w1", double, args=(torch.ones(1, requires_grad=True),))


def a_call_with_references(reference):
    gw.rpc_sync("w1", reference_to_double, args=(torch.ones(1), reference))


def a_future(_):
    gw.rpc_async("w1", double, args=(torch.ones(1, requires_grad=True),)).wait()


def a_remote_call(_):
    gw.remote("w1", double, args=(torch.ones(1, requires_grad=True),))


def a_fetch(_):
    gw.remote("w1", double, args=(torch.ones(1, requires_grad=True),)).to_here()


def a_call_that_lasts(_):
    with pytest.raises(gw.CallTimeout):
        gw.rpc_sync("w1", until_cancelled, timeout=0.5)


PROGRAMS = [
    a_call,
    a_call_with_references,
    a_future,
    a_remote_call,
    a_fetch,
    a_call_that_lasts,
]


@pytest.fixture
def workers():
    gc.collect()
    gc.freeze()  # what is there already: the collector runs often below
    with cluster(2, expose=[HERE]) as made:
        yield made
    gc.unfreeze()


def remembered(workers):
    flush(workers)
    taken = sum(workers[0].worker.agent.window._taken.values())
    return leftovers(workers) + ([f"{taken} bytes in flight"] if taken else [])


def stays(workers):
    """What the workers still remember when nothing goes on any more."""
    if eventually(lambda: not remembered(workers), 0.2):
        return []
    gc.collect()  # what hung on a cycle, such as an exception and its frames
    return [] if eventually(lambda: not remembered(workers), 2.0) else remembered(workers)


def interrupted(workers, program, tried):
    """Run it once with an interrupt at a new point; where that was."""
    with workers[0].worker.scope():
        reference = gw.RRef(3)
        raising = RaisingOnce(tried)
        try:
            with raising:
                program(reference)
        except KeyboardInterrupt:
            pass
    return raising.where


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_nothing_of_a_call_is_left_wherever_a_signal_handler_raises(workers, program):
    tried, left = set(), None
    for _ in range(3):  # connect, and so on
        workers[0].run(program, workers[0].run(gw.RRef, 3))

    while left is None and (where := interrupted(workers, program, tried)):
        if now := stays(workers):
            left = f"{now} after an interrupt at {where}"

    assert left is None
    assert len(tried) > 100
    assert workers[0].run(gw.rpc_sync, "w1", double, args=(torch.ones(1),)).item() == 2
