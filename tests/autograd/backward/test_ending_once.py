"""A pass ends once on a worker, whoever says so, and how many at the same time."""

from __future__ import annotations

import threading

import pytest
import torch

from gradwire.autograd.backward.engine_run import execute, reached_from
from gradwire.autograd.undo import leaf as leaves
from gradwire.autograd.undo.leaf import LeafLocks
from gradwire.autograd.undo.nested_pass import EndOfRun, Nested
from gradwire.autograd.undo.undo_log import UndoLog


def adds(leaf, value, undo_log):
    """A run of a pass adds to the leaf."""
    loss = leaf * value
    reached, ones = reached_from([loss.grad_fn]), (torch.ones(()),)
    execute((loss,), ones, None, undo_log, reached, lambda: None, retain_graph=False)


class Slow:
    """A pass inside the one that fails, which is taken back when it is told to."""

    def __init__(self):
        self.taken_back = self.ended_well = 0
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def give_up(self):
        self.taken_back += 1
        self.has_begun.set()
        return self.goes_on.wait(10)

    def end_well(self):
        self.ended_well += 1


@pytest.fixture
def leaf():
    made = torch.ones((), requires_grad=True)
    made.grad = torch.tensor(2.0)
    return made


@pytest.fixture
def slow():
    made = Slow()
    yield made
    made.goes_on.set()


@pytest.fixture
def undo_log(leaf, slow):
    """Of a pass that has added to the leaf."""
    made = UndoLog(LeafLocks(), None)
    made.nested.append(Nested(slow.end_well, slow.give_up))
    adds(leaf, 3.0, made)
    assert leaf.grad == 5
    return made


@pytest.fixture
def undoing(undo_log, slow):
    """A thread that is in the middle of putting back."""
    thread = threading.Thread(target=undo_log.undo)
    thread.start()
    assert slow.has_begun.wait(10)
    yield thread
    slow.goes_on.set()
    thread.join(10)


def test_a_second_that_puts_back_waits_for_the_first(undo_log, leaf, slow, undoing):
    assert not undo_log.undo(seconds=0)
    assert leaf.grad == 5

    slow.goes_on.set()
    assert undo_log.undo()
    assert leaf.grad == 2
    assert (slow.taken_back, slow.ended_well, undo_log.what_stays("w1")) == (1, 0, "")


def test_many_that_put_back_at_once_do_it_once(undo_log, leaf, slow, undoing):
    results = []
    others = [threading.Thread(target=lambda: results.append(undo_log.undo())) for _ in range(4)]
    for other in others:
        other.start()
    slow.goes_on.set()
    for other in others:
        other.join(10)

    assert results == [True] * 4
    assert leaf.grad == 2
    assert (slow.taken_back, undo_log.what_stays("w1")) == (1, "")


def test_what_is_being_put_back_is_not_kept(undo_log, leaf, slow, undoing):
    undo_log.keep()

    assert undo_log.has_changed
    slow.goes_on.set()
    assert undo_log.undo()
    assert leaf.grad == 2
    assert (slow.taken_back, slow.ended_well) == (1, 0)


def test_what_was_kept_is_not_put_back(undo_log, leaf, slow):
    undo_log.keep()
    assert undo_log.undo()
    undo_log.keep()

    assert leaf.grad == 5
    assert (slow.taken_back, slow.ended_well, undo_log.what_stays("w1")) == (0, 1, "")


def test_a_pass_inside_that_cannot_be_taken_back_does_not_keep_the_rest(leaf):
    def give_up():
        raise RuntimeError("nobody listens")

    undo_log = UndoLog(LeafLocks(), None)
    undo_log.nested.append(Nested(lambda: None, give_up))
    adds(leaf, 3.0, undo_log)

    assert undo_log.undo()
    assert leaf.grad == 2
    assert "stays as it is on w1" in undo_log.what_stays("w1")


class Interrupted(list):
    """The entries of a leaf; when one is taken out, another pass has just ended well."""

    def __init__(self, entries, ends):
        super().__init__(entries)
        self._ends = ends

    def _end(self):
        ends, self._ends = self._ends, None
        if ends is not None:
            ends.keep()

    def index(self, entry):
        found = super().index(entry)
        self._end()
        return found

    def remove(self, entry):
        self._end()
        super().remove(entry)


@pytest.mark.parametrize("ends", [0, 2], ids=["an earlier one", "a later one"])
def test_another_pass_ends_well_while_one_is_taken_out(leaf, ends):
    locks = LeafLocks()
    undo_logs = [UndoLog(locks, None) for _ in range(4)]
    for n, undo_log in enumerate(undo_logs):
        adds(leaf, 10.0**n, undo_log)
    record = locks.of(leaf)
    record.unfinished = Interrupted(record.unfinished, undo_logs[ends])

    assert undo_logs[1].undo()
    assert leaf.grad == 2 + 1 + 100 + 1000
    assert undo_logs[3].undo()
    assert leaf.grad == 2 + 1 + 100
    for n in {0, 2} - {ends}:
        assert undo_logs[n].undo()
    assert leaf.grad == 2 + 10.0**ends
    assert record.unfinished == []
    assert [undo_log.what_stays("w1") for undo_log in undo_logs] == [""] * 4


def test_what_cannot_be_taken_out_in_time_is_part_of_the_sum(leaf, monkeypatch):
    monkeypatch.setattr(leaves, "LEAF_SECONDS", 0)
    locks = LeafLocks()
    failed, other = UndoLog(locks, None), UndoLog(locks, None)
    adds(leaf, 3.0, failed)
    record = locks.of(leaf)
    held, release = threading.Event(), threading.Event()

    def hold():
        with record.lock:
            held.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    assert failed.undo()
    release.set()
    holder.join(10)

    assert "a gradient stays as it is on w1" in failed.what_stays("w1")
    assert record.unfinished == []
    adds(leaf, 4.0, other)
    assert other.undo()
    assert (leaf.grad, other.what_stays("w1")) == (5, "")


def test_what_cannot_be_given_up_after_a_failed_run_is_logged(leaf, caplog):
    def give_up():
        raise RuntimeError("nobody listens")

    def hook(_):
        EndOfRun(lambda: None, give_up)
        raise ValueError("in the hook")

    doubled = leaf * 2
    doubled.register_hook(hook)
    with pytest.raises(ValueError, match="in the hook"):
        doubled.backward()

    assert "could not be given up" in caplog.text
    assert "nobody listens" in caplog.text
