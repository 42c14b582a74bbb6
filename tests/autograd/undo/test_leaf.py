"""Passes that add to a leaf, end well and fail in any order: what is left is the rest, in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.autograd.backward.engine_run import execute, reached_from
from gradwire.autograd.undo.leaf import Addition, LeafLocks, folded, is_total, total, without
from gradwire.autograd.undo.undo_log import UndoLog, _by_run
from tests.autograd.tables import contexts_of

VALUES = [0.1, 3e7, 0.7, 1e-3, 5e6, 0.2, 0.3, 1e8]


def adds(leaf, value, undo_log):
    """A run of a pass adds to the leaf; without a undo log it is a backward that keeps no books."""
    loss = leaf * value
    if undo_log is None:
        loss.backward()
        return
    reached, ones = reached_from([loss.grad_fn]), (torch.ones(()),)
    execute((loss,), ones, None, undo_log, reached, lambda: None, retain_graph=False)


def summed(base, values):
    result = base
    for value in map(torch.tensor, values):
        result = value if result is None else result + value
    return result


ACTS = st.lists(
    st.tuples(st.sampled_from(["adds", "adds", "local", "keep", "undo"]), st.integers(0, 3)),
    max_size=16,
)


@pytest.mark.parametrize("into_map", [False, True], ids=["grad", "map"])
@given(ACTS, st.booleans())
def test_what_is_left_is_what_the_others_have_added_in_their_order(into_map, acts, has_base):
    locks, leaf = LeafLocks(), torch.ones((), requires_grad=True)
    base = torch.tensor(0.9) if has_base else None
    context = contexts_of(0).new() if into_map else None
    into = None if context is None else context.gradients
    if has_base and into is not None:
        into[leaf] = base.clone()
    elif has_base:
        leaf.grad = base.clone()
    undo_logs, expected = {}, []
    for n, (act, who) in enumerate([*acts, *(("undo", who) for who in range(4))]):
        value = VALUES[n % len(VALUES)]
        if act == "local" and not into_map:
            adds(leaf, value, None)
            expected.append((None, value))
        elif act == "adds" and who not in undo_logs:
            undo_logs[who] = UndoLog(locks, context)
            adds(leaf, value, undo_logs[who])
            expected.append((undo_logs[who], value))
        elif act == "keep" and who in undo_logs:
            undo_logs.pop(who).keep()
        elif act == "undo" and who in undo_logs:
            failed = undo_logs.pop(who)
            failed.undo()
            assert failed.what_stays("w1") == ""
            expected = [one for one in expected if one[0] is not failed]
        got = leaf.grad if into is None else into.get(leaf)
        want = summed(base, [value for _, value in expected])
        assert got is want is None or torch.equal(got, want)
    assert locks.of(leaf).unfinished == []
    assert _by_run == {}


def part(run, value):
    return Addition(run, torch.tensor(value))


def test_parts_that_stay_are_made_one_as_far_as_none_before_them_may_go():
    parts = (part(1, 0.5), part(2, 0.25), part(3, 1.0))

    first, rest = folded(torch.tensor(2.0), parts, {2})
    assert (first, rest) == (2.5, parts[1:])
    assert folded(None, parts, {1, 2, 3}) == (None, parts)
    assert total(first, rest) == total(torch.tensor(2.0), parts) == 3.75


def test_what_others_than_one_run_have_added():
    parts = (part(1, 0.5), part(2, 0.25), part(1, 1.0))

    assert without(1, parts) == parts[1:2]
    assert without(9, parts) == parts


def test_a_sum_is_told_from_what_a_hook_has_made_of_it():
    nan = torch.tensor([float("nan"), 1.0])

    assert is_total(nan + 1, nan, (Addition(1, torch.ones(2)),))
    assert not is_total(nan, nan, (Addition(1, torch.ones(2)),))
    assert not is_total(None, nan, ())
    assert is_total(None, None, ())
    assert not is_total(torch.ones(2, requires_grad=True), torch.ones(2), ())
    assert not is_total(torch.ones(3), torch.ones(2), ())
