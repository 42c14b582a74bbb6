"""Passes that meet at a leaf: one that fails leaves what is there as if it had never been.

w0 begins a pass that adds to a leaf of w1 and then fails. What happens in between happens in a hook
on w0, when w1 has done its part. The values are such that another order of the same sum differs.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch

import gradwire as gw
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
LEAVES: dict[str, torch.Tensor] = {}
BASE = [None, [0.1, 1e8]]


@pytest.fixture(scope="module")
def workers():
    with cluster(4, expose=[HERE]) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(workers):
    LEAVES["leaf"] = torch.ones(2, requires_grad=True)
    LEAVES["table"] = torch.nn.Parameter(torch.ones(4, 2))
    yield
    LEAVES.clear()
    assert_nothing_left(workers)


def begin_with(base):
    LEAVES["leaf"].grad = None if base is None else torch.tensor(base)


# -- what runs on w1


def times_leaf(x):
    return x * LEAVES["leaf"]


def rows(x, places):
    table = torch.nn.functional.embedding(torch.tensor(places), LEAVES["table"], sparse=True)
    return (table * x).sum(0)


def again(x):
    """Behind a backward of a Function's own."""
    return torch.utils.checkpoint.checkpoint(
        times_leaf, x, use_reentrant=True, preserve_rng_state=False
    )


# -- trainers


def in_thread(function, *args):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function, *args).result(60)


def train(workers, who, value, meanwhile=None, function=times_leaf, *args):
    """One pass of a trainer, which adds `value` to the leaf; it fails after `meanwhile`."""

    def hook(_):
        in_thread(meanwhile)
        raise ValueError("refused by a hook")

    def program():
        with gw.context():
            x = torch.tensor(value, requires_grad=True)
            start = x * 1
            if meanwhile is not None:
                start.register_hook(hook)
            gw.rpc_sync("w1", function, args=(start, *args)).sum().backward()

    if meanwhile is None:
        workers[who].run(program)
    else:
        with pytest.raises(ValueError, match="refused by a hook"):
            workers[who].run(program)


def local(workers, value):
    """A backward of w1's own, without any call."""

    def program():
        (torch.tensor(value) * LEAVES["leaf"]).sum().backward()

    workers[1].run(program)


def summed(base, *values):
    total = None if base is None else torch.tensor(base)
    for value in values:
        total = torch.tensor(value) if total is None else total + torch.tensor(value)
    return total


def assert_leaf(base, *values):
    got, want = LEAVES["leaf"].grad, summed(base, *values)
    assert (got is None) == (want is None)
    assert got is None or torch.equal(got, want), f"{got}, alone {want}"
    assert not LEAVES["leaf"].grad_fn


A, B, C, D = [100.0, 3e-5], [1.0, 0.2], [0.3, 7e7], [0.7, 0.1]


@pytest.mark.parametrize("base", BASE)
def test_a_pass_that_fails_is_gone_when_another_has_added_since(workers, base):
    begin_with(base)
    train(workers, 0, A, lambda: train(workers, 2, B))
    assert_leaf(base, B)


@pytest.mark.parametrize("base", BASE)
@pytest.mark.parametrize("function", [times_leaf, again])
def test_several_have_added_since(workers, base, function):
    begin_with(base)

    def meanwhile():
        train(workers, 2, B, None, function)
        train(workers, 3, C, None, function)
        train(workers, 2, D, None, function)

    train(workers, 0, A, meanwhile, function)
    assert_leaf(base, B, C, D)


@pytest.mark.parametrize("base", BASE)
def test_a_backward_of_the_owner_s_own_has_added_since(workers, base):
    begin_with(base)

    def meanwhile():
        train(workers, 2, B)
        local(workers, C)
        train(workers, 2, D)

    train(workers, 0, A, meanwhile)
    assert_leaf(base, B, C, D)


@pytest.mark.parametrize("base", BASE)
def test_several_that_fail_one_inside_the_other(workers, base):
    """Each begins before the one before it has failed, and fails first."""
    begin_with(base)

    def second():
        train(workers, 3, C)
        train(workers, 2, D, lambda: train(workers, 3, B))

    train(workers, 0, A, second)
    assert_leaf(base, C, B)


@pytest.mark.parametrize("base", BASE)
@pytest.mark.parametrize("fails", [False, True])
def test_the_first_fails_before_the_second_is_over(workers, base, fails):
    """w2's pass begins inside w0's and goes on after that has failed; it fails, or it does not."""
    begin_with(base)
    has_begun, may_end = threading.Event(), threading.Event()

    def program():
        with gw.context():
            x = torch.tensor(B, requires_grad=True)
            start = x * 1

            def hook(_):
                has_begun.set()
                assert may_end.wait(60)
                if fails:
                    raise ValueError("refused by a hook")

            start.register_hook(hook)
            gw.rpc_sync("w1", times_leaf, args=(start,)).sum().backward()

    with ThreadPoolExecutor(1) as threads:
        second = []

        def meanwhile():
            second.append(threads.submit(workers[2].run, program))
            assert has_begun.wait(60)
            train(workers, 3, C)

        train(workers, 0, A, meanwhile)
        assert_leaf(base, B, C)
        train(workers, 3, D)
        may_end.set()
        if fails:
            with pytest.raises(ValueError, match="refused by a hook"):
                second[0].result(60)
        else:
            second[0].result(60)
    assert_leaf(base, *([C, D] if fails else [B, C, D]))


@pytest.mark.parametrize("base", BASE)
def test_one_that_ends_well_stays_when_another_has_failed_since(workers, base):
    """The other way round: what fails has begun later."""
    begin_with(base)
    done = threading.Event()

    def program():
        with gw.context():
            x = torch.tensor(A, requires_grad=True)
            start = x * 1

            def hook(_):
                in_thread(lambda: train(workers, 2, B, lambda: train(workers, 3, C)))
                done.set()

            start.register_hook(hook)
            gw.rpc_sync("w1", times_leaf, args=(start,)).sum().backward()

    workers[0].run(program)
    assert done.is_set()
    assert_leaf(base, A, C)


def test_sparse_gradients(workers):
    table = LEAVES["table"]
    alone = torch.nn.Parameter(torch.ones(4, 2))
    for value, places in ((B, [1, 2]), (C, [2, 3])):
        table_, table_grad = alone, alone.grad
        found = torch.nn.functional.embedding(torch.tensor(places), table_, sparse=True)
        (found * torch.tensor(value)).sum(0).sum().backward()
        assert table_.grad is not table_grad or table_grad.is_sparse

    def meanwhile():
        train(workers, 2, B, None, rows, [1, 2])
        train(workers, 3, C, None, rows, [2, 3])

    train(workers, 0, A, meanwhile, rows, [0, 2])
    assert table.grad.is_sparse
    assert torch.equal(table.grad.to_dense(), alone.grad.to_dense())


@pytest.mark.parametrize("base", BASE)
def test_what_others_hold_of_the_gradient_is_mended_too(workers, base):
    begin_with(base)
    held = []

    def meanwhile():
        train(workers, 2, B)
        held.append(LEAVES["leaf"].grad)

    train(workers, 0, A, meanwhile)
    assert LEAVES["leaf"].grad is held[0]
    assert_leaf(base, B)


def test_hooks_that_only_look_do_not_stand_in_the_way(workers):
    seen = []
    LEAVES["leaf"].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    LEAVES["leaf"].register_hook(lambda g: g * 2)
    train(workers, 0, A, lambda: train(workers, 2, B))

    assert torch.equal(LEAVES["leaf"].grad, 2 * torch.tensor(B))
    first = 2 * torch.tensor(A)
    assert seen == [first.tolist(), (first + 2 * torch.tensor(B)).tolist()]


def use_up(p):
    p.grad = None


def change(p):
    p.grad.clamp_(max=2)


def change_unseen(p):
    p.grad.data.clamp_(max=2)


STAYS = "a gradient of a failed pass stays: it was used or changed since"


def assert_refused_once(workers):
    """w0 is told before its next pass over w1 that the leaves there are not as they were."""
    before = LEAVES["leaf"].grad.clone()
    words = r"p0\.\d+ was not begun: w1 did not confirm that p0\.\d+ was rolled back"
    with pytest.raises(gw.UsageError, match=words):
        train(workers, 0, B)
    assert torch.equal(LEAVES["leaf"].grad, before)
    train(workers, 0, B)
    train(workers, 2, B)


@pytest.mark.parametrize("hook", [change, change_unseen])
def test_what_a_hook_has_made_of_both_stays_and_is_said(workers, caplog, hook):
    def meanwhile():
        LEAVES["leaf"].register_post_accumulate_grad_hook(hook)
        train(workers, 2, B)

    train(workers, 0, A, meanwhile)
    assert [record.getMessage() for record in caplog.records if "stays" in record.message] == [
        STAYS
    ]
    assert_refused_once(workers)


def test_what_the_program_has_used_up_is_not_put_back(workers, caplog):
    """A step that took the gradient of a pass which then failed cannot be undone; it is said."""
    begin_with([5.0, 5.0])

    def meanwhile():
        train(workers, 2, B)
        LEAVES["leaf"].grad = None
        train(workers, 2, C)

    train(workers, 0, A, meanwhile)
    assert_leaf(None, C)
    assert [record.getMessage() for record in caplog.records if "stays" in record.message] == [
        STAYS
    ]
    assert_refused_once(workers)


def hooked_there():
    y = torch.tensor(A, requires_grad=True) * 1
    y.register_hook(THERE[0])
    return y


THERE: list = []


def test_whoever_began_the_failed_pass_is_told_what_stays(workers):
    def fail(_):
        in_thread(lambda: train(workers, 3, B))
        LEAVES["leaf"].grad.mul_(2)
        raise ValueError("refused by a hook")

    def program():
        with gw.context():
            y = gw.rpc_sync("w2", hooked_there)
            with pytest.raises(ValueError, match="refused by a hook") as failed:
                gw.rpc_sync("w1", times_leaf, args=(y,)).sum().backward()
            return failed.value.__notes__

    THERE[:] = [fail]
    assert workers[0].run(program) == [
        "a gradient stays as it is on w1: what the pass had added was used or changed since"
    ]
    assert_refused_once(workers)


def test_hooks_that_use_gradients_up_at_once_never_meet(workers, caplog):
    """As an optimizer that steps in backward does."""
    LEAVES["leaf"].register_post_accumulate_grad_hook(use_up)
    train(workers, 0, A, lambda: train(workers, 2, B))
    assert LEAVES["leaf"].grad is None
    assert not caplog.records


@pytest.mark.parametrize("first", [False, True])
def test_passes_of_one_context_meet_in_its_map(workers, first):
    def program():
        with gw.context() as context:
            x, y = torch.tensor(A, requires_grad=True), torch.tensor(B, requires_grad=True)
            start = x * 1
            other = gw.rpc_sync("w1", times_leaf, args=(y,)).sum()
            if first:
                gw.backward(context, [other], retain_graph=True)

            def hook(_):
                in_thread(copy_context().run, lambda: gw.backward(context, [other]))
                raise ValueError("refused by a hook")

            start.register_hook(hook)
            loss = gw.rpc_sync("w1", times_leaf, args=(start,)).sum()
            with pytest.raises(ValueError, match="refused by a hook"):
                gw.backward(context, [loss])
            return workers[1].run(gw.get_gradients, context)

    (gradient,) = workers[0].run(program).values()
    assert torch.equal(gradient, summed(None, *([B] * (1 + first))))
    assert LEAVES["leaf"].grad is None


def test_nothing_of_a_pass_is_kept_when_it_is_over(workers):
    train(workers, 2, B)
    train(workers, 0, A, lambda: train(workers, 2, B))
    leaf = LEAVES["leaf"]
    record = workers[1].worker.engine.coordinator._locks.of(leaf)
    assert eventually(lambda: record.unfinished == [])
    node = leaf.view_as(leaf).grad_fn.next_functions[0][0]
    hooks = []
    node.register_prehook(hooks.append)
    leaf.sum().backward()
    assert len(hooks) == 1
