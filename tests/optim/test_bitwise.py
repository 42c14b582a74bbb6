"""Three workers step exactly as one process does: every bit, for fifty steps."""

from __future__ import annotations

import random

import pytest
import torch

import gradwire
from gradwire.testing import cluster
from tests import strength
from tests.leftovers import assert_nothing_left
from tests.optim import far

STEPS = strength.count(50, 16)
CLASSES = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}
WAYS = ["map", "grad", "grad in a context", "map of a graph from outside", "map of two halves"]
"""Where a step computes its graph, and where its gradients are."""


@pytest.fixture(scope="module")
def workers():
    with cluster(3, expose=[far]) as workers:
        yield workers
        assert_nothing_left(workers)


def batch(n):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(n)).double()


class Here:
    """The program in one process."""

    def __init__(self, cls, options):
        self.parts = [far.Part(seed) for seed in range(3)]
        self.parameters = [p for part in self.parts for p in part.parameters()]
        self.optimizer = cls(self.parameters, **options)

    def loss(self, x):
        for part in self.parts:
            x = part(x)
        return x.square().mean()

    def step(self, n, losses=1, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)
        for k in range(losses):
            self.loss(batch(n + k)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 0.05)
        self.optimizer.step()
        return norm

    def values(self):
        return [p.detach() for p in self.parameters]


class Spread:
    """The same over three workers."""

    def __init__(self, cls, options):
        self.parts = [gradwire.remote(f"w{seed}", far.Part, args=(seed,)) for seed in range(3)]
        refs = [ref for part in self.parts for ref in part.rpc_sync().refs()]
        self.optimizer = gradwire.DistributedOptimizer(cls, refs, **options)

    def loss(self, x):
        return self.rest(x, 0)

    def rest(self, x, first):
        for part in self.parts[first:]:
            x = part.rpc_sync().forward(x)
        return x.square().mean()

    def step(self, n, losses=1, set_to_none=True, way="grad"):
        if way == "grad":
            return self.plain_step(n, losses, set_to_none)
        if way == "grad in a context":
            with gradwire.context():
                return self.plain_step(n, losses, set_to_none)
        before = []
        for k in range(losses):
            if way == "map of a graph from outside":
                before.append(self.loss(batch(n + k)))
            elif way == "map of two halves":
                before.append(self.parts[0].rpc_sync().forward(batch(n + k)))
        with gradwire.context() as context:
            for k in range(losses):
                if way == "map":
                    loss = self.loss(batch(n + k))
                else:
                    loss = before[k] if way != "map of two halves" else self.rest(before[k], 1)
                gradwire.backward(context, [loss])
            norm = self.optimizer.clip_grad_norm_(0.05, context_id=context)
            self.optimizer.step(context)
        return norm

    def plain_step(self, n, losses, set_to_none):
        self.optimizer.zero_grad(set_to_none)
        for k in range(losses):
            self.loss(batch(n + k)).backward()
        norm = self.optimizer.clip_grad_norm_(0.05)
        self.optimizer.step()
        return norm

    def values(self):
        return [value for part in self.parts for value in part.rpc_sync().values()]


def assert_same(spread, here):
    for a, b in zip(spread, here, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [["map"], ["grad"], WAYS], ids=["context", "grad", "mixed"])
@pytest.mark.parametrize("name", CLASSES)
def test_fifty_steps_with_schedule_clipping_and_resumption(workers, name, ways):
    workers[0].run(fifty_steps, *CLASSES[name], ways, random.Random(f"{name} {ways}"))


def fifty_steps(cls, options, ways, draw):
    here, spread = Here(cls, options), Spread(cls, options)
    schedules = [torch.optim.lr_scheduler.StepLR(p.optimizer, 10, 0.5) for p in (here, spread)]
    for n in range(STEPS):
        if n == STEPS // 2:
            spread, schedules[1] = resumed(spread, schedules[1], cls, options)
        kind = {"losses": draw.choice([1, 1, 2]), "set_to_none": draw.random() < 0.7}
        way = draw.choice(ways)
        norms = here.step(n, **kind), spread.step(n, **kind, way=way)
        assert torch.equal(*norms), (n, way, kind)
        for schedule in schedules:
            schedule.step()
        assert_same(spread.values(), here.values())
    mine, theirs = spread.optimizer.state_dict(), here.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for n, state in theirs["state"].items():
        assert_same(mine["state"][n].values(), state.values())


def resumed(spread, schedule, cls, options):
    """A new optimizer over the same parameters, that goes on from what the old one saved."""
    saved, when = spread.optimizer.state_dict(), schedule.state_dict()
    spread.optimizer = gradwire.DistributedOptimizer(
        cls, spread.optimizer.param_groups[0]["params"], **options
    )
    fresh = torch.optim.lr_scheduler.StepLR(spread.optimizer, 10, 0.5)
    spread.optimizer.load_state_dict(saved)
    fresh.load_state_dict(when)
    return spread, fresh
