"""Code that interrupts gradwire on its own thread: a finalizer, a signal handler.

Both may run between any two steps of the interpreter, also while a lock is held. Here a tracer runs
such code at each line in turn, so that every place is tried, always in the same order.
"""

from __future__ import annotations

import ast
import gc
import linecache
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import gradwire as gw
from gradwire.agent.links.readers import ChannelReaders
from gradwire.agent.requests.promise import Promise
from gradwire.autograd.scope import current_context
from gradwire.rpc.calls.futures import DecodedBody, PendingResult
from gradwire.testing import cluster

HERE = sys.modules[__name__]
SOURCE = str(Path(gw.__file__).parent)
NOT_HERE = ("transport", "testing", "agent/links/readers.py")
"""where reading and writing have rules of their own; so has what is done with what was read"""
SECONDS = 40.0


def double(x):
    return x * 2


def reference_to(x):
    return gw.RRef(x * 2)


def fetched(reference):
    return reference.to_here()


@pytest.fixture
def workers():
    with cluster(2, expose=[HERE]) as made:
        yield made


def is_one_step(name, line):
    """Between this line and the one before it there is no call: only a tracer comes there."""
    return "# one step" in linecache.getline(name, line)


class Interrupting:
    """Runs `action` once, at the first line of gradwire that is not among those `tried`."""

    def __init__(self, tried, action):
        self._tried, self._action = tried, action
        self.where = self.error = None

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE) or name[len(SOURCE) + 1 :].startswith("testing"):
            return None
        if event == "line" and self.where is None and not is_one_step(name, frame.f_lineno):
            where = f"{name[len(SOURCE) + 1 :]}:{frame.f_lineno}"
            if where not in self._tried:
                self._tried.add(where)
                self.where = where
                try:
                    self._action()
                except gw.GradwireError as error:
                    self.error = error
        return self._trace


def on_a_thread(workers, program):
    """Within a time: a thread that waits for itself must not stop the test."""
    failed = []

    def run():
        try:
            workers[0].run(program)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if thread.is_alive():
        frame, lines = sys._current_frames()[thread.ident], []
        while frame is not None:
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        pytest.fail("it hangs at\n" + "\n".join(lines))
    if failed:
        raise failed[0]


def a_call():
    x = torch.ones(1, requires_grad=True)
    with gw.context():
        y = gw.rpc_sync("w1", double, args=(x,))
        assert y.item() == 2


def a_backward():
    x = torch.ones(1, requires_grad=True)
    with gw.context():
        gw.rpc_sync("w1", double, args=(gw.rpc_sync("w1", double, args=(x,)),)).sum().backward()
        assert x.grad.item() == 4


def a_backward_into_the_map():
    x = torch.ones(1, requires_grad=True)
    with gw.context() as context_id:
        gw.backward(context_id, [gw.rpc_sync("w1", double, args=(x,)).sum()])
        assert gw.get_gradients(context_id)[x].item() == 2


def a_reference():
    reference = gw.rpc_sync("w1", reference_to, args=(torch.ones(1),))
    assert gw.rpc_sync("w1", fetched, args=(reference,)).item() == 2
    assert reference.to_here().item() == 2


def calls_in_flight():
    futures = [gw.rpc_async("w1", double, args=(torch.ones(1),)) for _ in range(3)]
    assert [future.wait().item() for future in futures] == [2.0] * 3


PROGRAMS = [a_call, a_backward, a_backward_into_the_map, a_reference, calls_in_flight]


def a_nested_call():
    """With a tensor of the context, if it interrupts code that is in one."""
    x = torch.ones(1, requires_grad=current_context() is not None)
    assert gw.rpc_sync("w1", double, args=(x,), timeout=5.0).item() == 2


def a_nested_backward():
    if current_context() is None:
        a_nested_call()
        return
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        gw.rpc_sync("w1", double, args=(x,), timeout=5.0).sum().backward()
    assert x.grad.item() == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "nested"),
    [*((program, a_nested_call) for program in PROGRAMS), (a_backward, a_nested_backward)],
    ids=lambda f: f.__name__,
)
def test_a_call_may_be_made_between_any_two_lines(workers, program, nested):
    """It is done or refused, at once; what it interrupted goes on as if nothing had been."""
    tried, refused = set(), {}

    def every_line():
        program()
        while True:
            with Interrupting(tried, nested) as interrupting:
                program()
            if interrupting.where is None:
                return
            if interrupting.error is not None:
                refused[interrupting.where] = interrupting.error

    on_a_thread(workers, every_line)
    wrong = {w: e for w, e in refused.items() if not isinstance(e, gw.UsageError)}
    assert wrong == {}
    assert {w for w in refused if w.startswith("autograd/graph/crossing.py")} == set()
    assert len(refused) < len(tried) / 3
    assert all("a finalizer or a signal handler" in str(error) for error in refused.values())
    assert all("queue.SimpleQueue" in error.hint for error in refused.values())


# -- finalizers that the collector runs


class Finalized:
    """In a cycle, so that only the collector ends it; it makes a call then."""

    def __init__(self, x, ended):
        self.itself, self._x, self._ended = self, x, ended
        self._thread = threading.get_ident()

    def __del__(self):
        if threading.get_ident() != self._thread:  # it may be one that reads, or of no worker
            self._ended.append(None)
            return
        try:
            self._ended.append(gw.rpc_sync("w1", double, args=(self._x,), timeout=20.0).item())
        except gw.UsageError as error:
            self._ended.append(str(error))


def test_a_call_inside_the_opening_of_a_connection_is_refused(workers, monkeypatch):
    """The connection has no reader yet, and the lock of its peer is held."""
    opened, refused = ChannelReaders.open, []

    def interrupted(self, *args):
        if threading.current_thread() is threading.main_thread() and not refused:
            with pytest.raises(gw.UsageError, match="on a thread that others need") as raised:
                gw.rpc_sync("w1", double, args=(1,), timeout=2.0)
            refused.append(raised.value)
        opened(self, *args)

    monkeypatch.setattr(ChannelReaders, "open", interrupted)

    assert workers[0].run(gw.rpc_sync, "w1", double, args=(2,)) == 4
    assert len(refused) == 1


@pytest.fixture
def a_busy_collector():
    """Few objects are made before it looks again."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()  # not all that earlier tests have made
    gc.set_threshold(7, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("a_busy_collector")
def test_finalizers_that_the_collector_runs_may_make_calls(workers):
    ended = []

    def program():
        x = torch.ones(1, requires_grad=True)
        with gw.context():
            for _ in range(20):
                Finalized(x, ended)
                assert gw.rpc_sync("w1", double, args=(x,), timeout=20.0).item() == 2
            gc.collect()

    on_a_thread(workers, program)
    assert len(ended) == 20
    refused = [said for said in ended if said not in (2.0, None)]
    assert all("while it holds a lock" in said for said in refused)


def test_a_future_is_not_unpacked_inside_of_its_own_unpacking():
    came = Promise()
    came.settle("the answer")
    pending = PendingResult(came, lambda _: DecodedBody(pending.value(), 0))

    with pytest.raises(gw.UsageError, match="a call was waited for by a finalizer") as raised:
        pending.value()
    assert raised.value.hint == "wait for it elsewhere"


# -- the rules, as far as the source shows them

FILES = sorted(Path(SOURCE).rglob("*.py"))
PLAIN_LOCKS = {
    "agent/agent.py": 1,  # taken without waiting
    "agent/requests/promise.py": 2,  # made to be waited for
    "threads.py": 1,  # only a type
    "rpc/recompute/checkpoint_run.py": 1,  # waited for ten seconds at most, then done without
}


def test_a_lock_may_be_taken_again_by_the_thread_that_has_it():
    found = Counter()
    for path in FILES:
        name = str(path.relative_to(SOURCE))
        if not name.startswith(NOT_HERE):
            found[name] += path.read_text().count("threading.Lock")
    assert +found == PLAIN_LOCKS


def test_where_no_calls_are_promised_there_are_none():
    """Without a call or a loop the interpreter runs nothing else of the same thread."""
    checked = 0
    for path in FILES:
        text = path.read_text()
        marked = [n for n, line in enumerate(text.splitlines(), 1) if "# no calls in here" in line]
        for node in ast.walk(ast.parse(text)) if marked else ():
            if isinstance(node, ast.With) and node.lineno in marked:
                inside = [type(part) for line in node.body for part in ast.walk(line)]
                made = {ast.Call, ast.For, ast.While, ast.List, ast.Dict, ast.Tuple, ast.ListComp}
                assert not made & set(inside), f"{path}:{node.lineno}"
                checked += 1
    assert checked == 6


def test_a_call_while_python_starts_or_ends_a_thread_is_refused(workers):
    """No other thread can be started then, and to wait may need one."""
    with threading._active_limbo_lock, pytest.raises(gw.UsageError, match="interrupts Python"):
        workers[0].run(gw.rpc_sync, "w1", double, args=(1,))

    assert workers[0].run(gw.rpc_sync, "w1", double, args=(1,)) == 2


def test_a_call_while_a_lock_of_another_worker_is_held_is_refused(workers):
    """A finalizer of one may interrupt a thread of the other, in one process."""
    with workers[1].worker.agent.directory.lock, pytest.raises(gw.UsageError, match="w1"):
        workers[0].run(gw.rpc_sync, "w1", double, args=(1,))
