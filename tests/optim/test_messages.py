"""What of an optimizer's options travels with a step: as it is, or not at all."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

import gradwire
from gradwire.ids import RefId, StepId
from gradwire.optim.messages import Commit, Prepare, maybe_plain
from gradwire.testing import cluster
from tests.case_names import case_name
from tests.optim import far


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "nesterov": False, "steps": 3},
        {"lr": -0.0, "most": math.inf, "n": -(1 << 63), "m": (1 << 64) - 1, "name": "é"},
    ],
)
def test_plain_options_come_as_they_left(options):
    plain = maybe_plain({2: options})
    sent = Prepare(RefId(1, 2), StepId(0, 7), None, plain, 1.0, wait=True, alone=False)

    came = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Prepare)

    assert repr(came) == repr(sent)
    assert type(came.step) is StepId


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_a_step_has_a_time_that_passes(seconds):
    sent = msgspec.msgpack.encode(Commit(RefId(1, 2), StepId(0, 7), seconds))

    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(sent, type=Commit)


@pytest.mark.parametrize(
    "value",
    [torch.tensor(0.1), 1 << 64, [0.9, 0.9], (1, (2,)), object(), {"a": 1}, 1j],
    ids=case_name,
)
def test_others_do_not_travel_with_a_step(value):
    assert maybe_plain({0: {"lr": 0.1}, 1: {"lr": value}}) is None


def test_a_name_that_is_no_text_does_not():
    assert maybe_plain({0: {1: 2}}) is None


@pytest.mark.parametrize("owners", [["w1"], ["w0", "w1"]], ids=len)
def test_options_that_are_not_plain_count_all_the_same(owners):
    with cluster(2, expose=[far]) as workers, workers[0].worker.scope():
        made = [gradwire.remote(owner, far.Part, args=(n,)) for n, owner in enumerate(owners)]
        refs = [ref for part in made for ref in part.rpc_sync().refs()]
        local = [p for n in range(len(owners)) for p in far.Part(n).parameters()]
        optimizer = gradwire.DistributedOptimizer(torch.optim.Adam, refs, lr=torch.tensor(0.1))
        truth = torch.optim.Adam(local, lr=torch.tensor(0.1))
        for part in made:
            part.rpc_sync().slope()
        for parameter in local:
            parameter.grad = torch.ones_like(parameter)

        for rate in (0.1, 0.4):
            optimizer.param_groups[0]["lr"] = torch.tensor(rate)
            truth.param_groups[0]["lr"] = torch.tensor(rate)
            optimizer.step()
            truth.step()

        found = [value for part in made for value in part.rpc_sync().values()]
        assert all(torch.equal(a, b) for a, b in zip(found, local, strict=True))
        del optimizer, made, refs
