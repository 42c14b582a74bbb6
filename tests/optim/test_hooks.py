"""Hooks and profilers see the steps of an optimizer and of its shards as they see torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import gradwire
from gradwire.optim import step
from gradwire.optim.step import copied_state
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left
from tests.optim import far


@pytest.fixture(scope="module")
def workers():
    with cluster(2, expose=[far]) as workers:
        yield workers


@pytest.fixture(autouse=True)
def on_w0(workers):
    with workers[0].worker.scope():
        yield
    assert_nothing_left(workers)


def made(cls=gradwire.DistributedOptimizer):
    part = gradwire.remote("w1", far.Part, args=(0,))
    optimizer = cls(torch.optim.SGD, part.rpc_sync().refs(), lr=0.5)
    part.rpc_sync().slope()
    return part, optimizer


def test_hooks_of_the_optimizer_get_what_step_was_given():
    _, optimizer = made()
    seen = []
    optimizer.register_step_pre_hook(lambda *given: seen.append(("before", *given)))
    after = optimizer.register_step_post_hook(lambda *given: seen.append(("after", *given)))

    optimizer.step(None, timeout=20)
    after.remove()
    optimizer.step()

    given = (optimizer, (optimizer, None), {"timeout": 20})
    assert seen == [("before", *given), ("after", *given), ("before", optimizer, (optimizer,), {})]


def test_a_hook_may_change_what_is_given():
    _, optimizer = made()
    optimizer.register_step_pre_hook(lambda _, args, __: (args, {"closure": int}))

    with pytest.raises(gradwire.UsageError, match="takes no closure"):
        optimizer.step()


def test_hooks_of_all_optimizers_see_both_ends():
    _, optimizer = made()
    seen = []
    before = register_optimizer_step_pre_hook(lambda o, *_: seen.append(type(o).__name__))
    after = register_optimizer_step_post_hook(lambda o, *_: seen.append(type(o).__name__))
    try:
        optimizer.step()
    finally:
        before.remove()
        after.remove()
    optimizer.step()

    assert seen == ["DistributedOptimizer", "SGD", "SGD", "DistributedOptimizer"]


class Twice(gradwire.DistributedOptimizer):
    """A class of the user's own."""

    def step(self, *args, **kwargs):
        super().step(*args, **kwargs)
        super().step(*args, **kwargs)


def test_a_step_that_calls_ours_is_seen_once():
    part, optimizer = made(Twice)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    values = part.rpc_sync().values()

    optimizer.step()

    assert seen == ["after"]
    assert all(
        torch.equal(a - 1.0, b) for a, b in zip(values, part.rpc_sync().values(), strict=True)
    )


def test_a_profiler_sees_it():
    _, optimizer = made()

    with torch.profiler.profile() as profile:
        optimizer.step()

    names = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#DistributedOptimizer.step" in names


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_state_is_kept_whole_and_apart(monkeypatch, one_by_one):
    if one_by_one:
        monkeypatch.setattr(step, "_clone", step.cloned_one_by_one)
    a, b, c, d = (torch.nn.Parameter(torch.zeros(2)) for _ in range(4))
    twin = torch.ones(2)
    state = {
        a: {"step": torch.tensor(3.0), "buffer": torch.ones(2), "n": 4, "more": [torch.ones(1)]},
        b: {"first": twin, "second": twin},
        c: torch.ones(3),
    }

    kept = copied_state(state, [(s, s) for s in (a, b, c, d)])
    with torch.no_grad():
        for tensor in (state[a]["step"], state[a]["buffer"], state[a]["more"][0], twin, state[c]):
            tensor.zero_()

    assert kept[a] == {"step": torch.tensor(3.0), "buffer": kept[a]["buffer"], "n": 4, "more": [1]}
    assert kept[a]["buffer"].tolist() == [1, 1]
    assert kept[b]["first"] is kept[b]["second"]
    assert kept[b]["first"].tolist() == [1, 1]
    assert kept[c].tolist() == [1, 1, 1]
    assert d not in kept


def test_a_profiler_sees_torch_s_own_step():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)

    with torch.profiler.profile() as profile:
        step.take_step(torch.optim.SGD([p], lr=0.5))

    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
    assert p.tolist() == [0.5, 0.5]
