"""A method that is waited for borrows its value: nothing is counted for it.

See Note [A call may borrow a reference], rpc/refs/refs.py.
"""

from __future__ import annotations

import sys

import pytest

import gradwire as gw
from gradwire.agent.serving.dispatch import Source
from gradwire.errors import BadMessage, NotSerializable, RemoteError, StaleIncarnation, UsageError
from gradwire.ids import RefId
from gradwire.rpc.calls.client import Target
from gradwire.rpc.calls.server import CallScope
from gradwire.rpc.refs.handles_state import BorrowedRef, LentRef, RefHandle
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]


@pytest.fixture
def workers():
    with cluster(3, expose=[HERE]) as workers:
        yield workers
        assert_nothing_left(workers)


class Box:
    def __init__(self, content):
        self.content = content

    def get(self):
        return self.content

    def holders(self):
        return counted()

    def same(self, other):
        return other.local_value() is self


def counted():
    """How many forks of values of this worker others hold, and how many holds it has itself."""
    table = gw.rpc.rref.current_worker.find().refs._table
    return [(len(value.forks), value.handles) for value in table.owned.values.values()]


def look_at(value):
    return type(value).__name__


def made_on_w1(content=7):
    box = gw.remote("w1", Box, args=(content,))
    box.rpc_sync().get()
    assert eventually(box.confirmed_by_owner)
    return box


def test_nothing_is_counted_while_it_is_lent(workers):
    def program():
        box = made_on_w1()
        assert eventually(lambda: box.rpc_sync().holders() == [(1, 0)])  # the first was counted
        assert box.rpc_async().holders().wait() == [(1, 1)]
        assert box.rpc_sync().same(box)
        assert box._lent() is not box

    workers[0].run(program)


def test_only_what_is_counted_and_held_is_lent(workers):
    def program():
        box, mine = made_on_w1(), gw.RRef(3)
        refs = workers[0].worker.refs
        assert isinstance(refs.maybe_lent(box.handle), LentRef)
        assert refs.maybe_lent(mine.handle) is None
        new = refs.keep_elsewhere(1)
        assert refs.maybe_lent(new) is None
        refs.creation_undone(new)
        refs.abandon()
        assert refs.maybe_lent(box.handle) is None
        with pytest.raises(UsageError, match="was dropped by w0 and cannot be passed on"):
            box.rpc_sync().get()

    workers[0].run(program)


def test_who_does_not_hold_a_value_cannot_lend_it(workers):
    kept = workers[0].run(made_on_w1)
    handle = kept.handle

    def steal():
        worker, target = workers[2].worker, Target(".get", (LentRef(handle),), {})
        with pytest.raises(RemoteError, match=r"w2 does not hold r0\.\d+"):
            worker.calls.call(1, target, worker.deadline(None))

    workers[2].run(steal)
    del kept


def test_what_is_gone_is_not_there_to_be_lent(workers):
    def program():
        worker = workers[0].worker
        target = Target(".get", (LentRef(RefHandle(RefId(0, 999), 1, None)),), {})
        with pytest.raises(RemoteError, match=r"r0\.999 is not kept on w1 any more"):
            worker.calls.call(1, target, worker.deadline(None))

    workers[0].run(program)


@pytest.mark.parametrize("said", [None, 3, [], [0, 1], [0, 1, 2, 3], [0, 1, True], [0, "1", 2]])
def test_what_is_no_name_is_refused(workers, said):
    scope = CallScope(workers[1].worker, None, inbound=Source(0, None, 1))
    with scope, pytest.raises(BadMessage, match="where a reference was expected"):
        workers[1].worker.refs.borrowed(said)


def test_one_of_an_earlier_incarnation_is_refused(workers):
    scope = CallScope(workers[1].worker, None, inbound=Source(0, None, 1))
    with scope, pytest.raises(StaleIncarnation, match="belongs to incarnation -1 of w1"):
        workers[1].worker.refs.borrowed([0, 1, -1])


def test_it_is_lent_to_calls_only(workers):
    with pytest.raises(BadMessage, match=r"r0\.1 was lent without a call"):
        workers[1].worker.refs.borrowed([0, 1, 0])


def test_what_is_borrowed_cannot_be_passed_on(workers):
    def program():
        borrowed = BorrowedRef(RefHandle(RefId(1, 1), 1, None))
        with pytest.raises(NotSerializable, match="BorrowedRef cannot be serialized"):
            gw.rpc_sync("w1", look_at, args=(borrowed,))

    workers[0].run(program)
