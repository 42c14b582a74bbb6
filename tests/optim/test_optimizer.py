"""What DistributedOptimizer offers besides the arithmetic: torch's own optimizer is the truth."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import gradwire
from gradwire import ContextClosed, DistributedOptimizer, StepFailed, UsageError
from gradwire.ids import RefId, StepId
from gradwire.optim.messages import Prepare
from gradwire.optim.shard import OptimizerHost, Shard, optimizer_host
from gradwire.testing import cluster
from tests.hearing import hearing
from tests.leftovers import assert_nothing_left
from tests.optim import far


@pytest.fixture(scope="module")
def workers():
    with cluster(3, expose=[far]) as workers:
        yield workers


@pytest.fixture(autouse=True)
def on_w0(workers):
    """Each test is code of w0, and leaves nothing behind."""
    with workers[0].worker.scope():
        yield
    assert_nothing_left(workers)


def parts(*owners):
    return [gradwire.remote(owner, far.Part, args=(n,)) for n, owner in enumerate(owners)]


def refs_of(made):
    return [ref for part in made for ref in part.rpc_sync().refs()]


def values_of(made):
    return [value for part in made for value in part.rpc_sync().values()]


def local_parameters(n):
    return [p for seed in range(n) for p in far.Part(seed).parameters()]


def slope(made):
    for part in made:
        part.rpc_sync().slope()


CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
    and cls.__name__ != "Muon"  # for matrices only
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_any_class_of_torch_steps_as_it_does_locally(cls):
    made = parts("w1", "w2")
    optimizer = DistributedOptimizer(cls, refs_of(made), lr=0.01)
    local = local_parameters(2)
    truth = cls(local, lr=0.01)

    slope(made)
    for p in local:
        p.grad = torch.ones_like(p)
    for _ in range(3):
        optimizer.step()
        truth.step()

    for found, expected in zip(values_of(made), local, strict=True):
        assert torch.equal(found, expected)


class Rounded(torch.Tensor):
    """Whole numbers, however it is stepped."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.add_:
            with torch._C.DisableTorchFunctionSubclass():
                args[0].round_()
        return found


@pytest.mark.parametrize("n", [1, 8])
def test_a_parameter_with_a_class_of_its_own_is_stepped_as_that_has_it(n):
    first = torch.tensor([1.0, 2.0, 3.0]).as_subclass(Rounded)
    here, elsewhere = [[nn.Parameter(first.clone()) for _ in range(n)] for _ in range(2)]
    optimizer = DistributedOptimizer(torch.optim.SGD, [*map(gradwire.RRef, elsewhere)], lr=0.3)
    for parameter in [*here, *elsewhere]:
        parameter.grad = torch.ones(3)

    torch.optim.SGD(here, lr=0.3).step()
    optimizer.step()

    assert here[0].tolist() == [1.0, 2.0, 3.0]
    assert [p.tolist() for p in elsewhere] == [p.tolist() for p in here]
    assert type(elsewhere[0]) is Rounded


def test_a_step_leaves_alone_what_has_no_gradient_and_grad_itself():
    used, unused = made = parts("w1", "w2")
    optimizer = DistributedOptimizer(torch.optim.SGD, refs_of(made), lr=0.1)
    before = unused.rpc_sync().values()

    with gradwire.context() as context:
        loss = used.rpc_sync().forward(torch.ones(1, 4).double()).sum()
        gradwire.backward(context, [loss])
        optimizer.step(context)

    assert all(torch.equal(a, b) for a, b in zip(unused.rpc_sync().values(), before, strict=True))
    assert not torch.equal(used.rpc_sync().values()[0], far.Part(0).values()[0])
    assert used.rpc_sync().grads() == [None] * 3
    assert list(optimizer.state) == []


def test_zero_grad_reaches_all_workers():
    made = parts("w0", "w1")
    optimizer = DistributedOptimizer(torch.optim.SGD, refs_of(made), lr=0.1)
    slope(made)

    optimizer.zero_grad(set_to_none=False)
    assert [g.abs().sum() for part in made for g in part.rpc_sync().grads()] == [0] * 6
    optimizer.zero_grad()
    assert [part.rpc_sync().grads() for part in made] == [[None] * 3] * 2


def test_groups_are_read_and_written_here_and_count_everywhere():
    first, second = made = parts("w1", "w2")
    groups = [
        {"params": first.rpc_sync().refs(), "lr": 0.5},
        {"params": second.rpc_sync().refs()},
    ]
    optimizer = DistributedOptimizer(torch.optim.SGD, groups, lr=0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert optimizer.param_groups[1]["momentum"] == optimizer.defaults["momentum"] == 0

    slope(made)
    optimizer.param_groups[1]["lr"] = 2.0
    optimizer.step()

    for part, n, by in ((first, 0, 0.5), (second, 1, 2.0)):
        moved = far.Part(n).values()[0] - part.rpc_sync().values()[0]
        torch.testing.assert_close(moved, torch.full_like(moved, by))


def test_a_group_can_be_added_on_old_and_new_owners():
    first, second = made = parts("w1", "w2")
    some, rest = first.rpc_sync().refs()[:2], first.rpc_sync().refs()[2:]
    optimizer = DistributedOptimizer(torch.optim.SGD, some, lr=1.0)

    optimizer.add_param_group({"params": [*rest, *second.rpc_sync().refs()], "lr": 3.0})
    slope(made)
    optimizer.step()

    was = [*far.Part(0).values(), *far.Part(1).values()]
    moved = [(a - b).mean() for a, b in zip(was, values_of(made), strict=True)]
    torch.testing.assert_close(moved, [torch.tensor(by).double() for by in (1, 1, 3, 3, 3, 3)])
    assert optimizer.param_groups[1]["momentum"] == 0


def test_a_group_that_cannot_be_added_is_added_nowhere():
    first, second = made = parts("w1", "w2")
    refs = first.rpc_sync().refs()
    optimizer = DistributedOptimizer(torch.optim.SGD, refs[:2], lr=1.0)

    with pytest.raises(UsageError, match="some parameters on w1 appear in more than one place"):
        optimizer.add_param_group(
            {"params": [first.rpc_sync().refs()[0], *second.rpc_sync().refs()]}
        )

    optimizer.add_param_group({"params": refs[2:]})
    slope(made)
    optimizer.step()
    assert len(optimizer.param_groups) == 2


# -- schedulers


def _halved(epoch):
    return 0.5**epoch


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, _halved),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


def test_every_scheduler_of_torch_is_tried():
    classes = {
        name
        for name, cls in vars(lr_scheduler).items()
        if isinstance(cls, type)
        and issubclass(cls, lr_scheduler.LRScheduler)
        and not name.startswith("_")
    }
    assert classes - {"LRScheduler"} == SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_take_it(name):
    made = parts("w1", "w2")
    optimizer = DistributedOptimizer(torch.optim.SGD, refs_of(made), lr=0.1, momentum=0.9)
    local = local_parameters(2)
    truth = torch.optim.SGD(local, lr=0.1, momentum=0.9)
    slope(made)
    for p in local:
        p.grad = torch.ones_like(p)

    mine, theirs = SCHEDULERS[name](optimizer), SCHEDULERS[name](truth)
    metric = (1.0,) if name == "ReduceLROnPlateau" else ()
    for _ in range(6):
        optimizer.step()
        truth.step()
        mine.step(*metric)
        theirs.step(*metric)
        assert optimizer.param_groups[0]["lr"] == truth.param_groups[0]["lr"]

    for found, expected in zip(values_of(made), local, strict=True):
        assert torch.equal(found, expected)


# -- clipping


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_is_that_of_one_process(norm_type):
    made = parts("w2", "w0", "w1")
    local = local_parameters(3)
    slope(made)
    for p in local:
        p.grad = torch.ones_like(p)

    total = gradwire.clip_grad_norm_(refs_of(made), 0.5, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(local, 0.5, norm_type)

    assert torch.equal(total, expected)
    found = [g for part in made for g in part.rpc_sync().grads()]
    assert all(torch.equal(g, p.grad) for g, p in zip(found, local, strict=True))


@pytest.mark.parametrize(("limit", "rounds"), [(0.5, 2), (1000.0, 1)])
@pytest.mark.parametrize("by_references", [False, True])
def test_clipping_tells_each_worker_once_and_again_only_if_it_must_scale(
    workers, limit, rounds, by_references
):
    made = parts("w1", "w2")
    refs = refs_of(made)
    optimizer = DistributedOptimizer(torch.optim.SGD, refs, lr=0.1)
    slope(made)
    calls = []

    with hearing(workers[0].worker, lambda e: calls.append(e) if e.what == "call" else None):
        if by_references:
            total = gradwire.clip_grad_norm_(refs, limit)
        else:
            total = optimizer.clip_grad_norm_(limit)

    local = local_parameters(2)
    for p in local:
        p.grad = torch.ones_like(p)
    assert torch.equal(total, torch.nn.utils.clip_grad_norm_(local, limit))
    found = [gradient for part in made for gradient in part.rpc_sync().grads()]
    assert all(torch.equal(a, b.grad) for a, b in zip(found, local, strict=True))
    assert len(calls) == 2 * rounds


def test_clipping_without_gradients_and_with_infinite_ones():
    (part,) = made = parts("w1")
    assert gradwire.clip_grad_norm_(refs_of(made), 1.0) == 0
    part.rpc_sync().slope(math.inf)
    with pytest.raises(UsageError, match=r"the total norm of order 2.0 .* is non-finite: inf"):
        gradwire.clip_grad_norm_(refs_of(made), 1.0, error_if_nonfinite=True)
    with pytest.raises(UsageError, match="parameter 0 is a Parameter, not a reference"):
        gradwire.clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0)


# -- state


def trained(made, steps=2):
    optimizer = DistributedOptimizer(torch.optim.Adam, refs_of(made), lr=0.1)
    slope(made)
    for _ in range(steps):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("sharded", [False, True])
def test_a_saved_state_goes_on_where_it_was(sharded):
    made, again = parts("w1", "w2"), parts("w2", "w0")  # elsewhere, too
    optimizer, resumed = trained(made), trained(again)
    saved = copy.deepcopy(optimizer.state_dict(sharded_by_owner=sharded))
    resumed.step()
    assert resumed.state_dict()["state"][0]["step"] == 3

    resumed.load_state_dict(saved)

    assert resumed.state_dict()["state"][0]["step"] == 2
    if sharded:
        assert {name: list(part) for name, part in saved["shards"].items()} == {
            "w1": [0, 1, 2],
            "w2": [3, 4, 5],
        }


@pytest.mark.parametrize("n", [1, 8])
def test_a_state_that_an_older_torch_has_saved_lacks_some_options(n):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(n)]
    optimizer = DistributedOptimizer(torch.optim.SGD, [*map(gradwire.RRef, parameters)], lr=0.5)
    saved = optimizer.state_dict()
    for option in ("foreach", "differentiable", "fused"):
        del saved["param_groups"][0][option]

    optimizer.load_state_dict(saved)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()

    assert all(parameter.tolist() == [0.5, 0.5] for parameter in parameters)


def test_a_gathered_state_is_torch_s_own():
    made = parts("w1", "w2")
    optimizer = trained(made)
    local = local_parameters(2)
    truth = torch.optim.Adam(local, lr=0.1)

    truth.load_state_dict(optimizer.state_dict())

    assert truth.state[local[4]]["step"] == 2
    assert optimizer.state[optimizer.param_groups[0]["params"][4]]["step"] == 2
    assert len(optimizer.state) == 6


def test_a_saved_state_is_not_that_of_a_step_which_is_dropped():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    share = (0, (0,), [gradwire.RRef(parameter)], {})
    shard = Shard(torch.optim.Adam, [share], (), {})
    step, deadline = StepId(9, 0), optimizer_host().worker.deadline(20.0)
    prepare = Prepare(RefId(0, 0), step, None, shard.options(), 20.0, wait=False, alone=False)
    assert shard._prepare(prepare, deadline)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(shard.state)
        optimizer_host().locks.give_up(step)
        assert asked.result() == {}


def test_a_state_that_does_not_fit_is_refused():
    optimizer = trained(parts("w1"))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["params"].pop()

    with pytest.raises(ValueError, match="parameter group 0 of the loaded state dict has 2 param"):
        optimizer.load_state_dict(saved)


# -- errors


def test_what_is_wrong_is_said_when_it_is_made():
    (part,) = parts("w1")
    refs = part.rpc_sync().refs()
    sgd = torch.optim.SGD
    for wrong, error, text in [
        ([], ValueError, "empty parameter list"),
        ([nn.Parameter(torch.ones(1))], UsageError, "parameter 0 is a Parameter, not a reference"),
        ([refs[0], refs[0]], UsageError, "a reference appears in more than one place"),
        ([refs[0], part.rpc_sync().refs()[0]], UsageError, "some parameters on w1 appear in more"),
        ([part], UsageError, "holds a Part, not a parameter"),
        ([gradwire.remote("w1", torch.ones, args=(3,))], None, ""),
    ]:
        if error is None:
            DistributedOptimizer(sgd, wrong, lr=0.1)
        else:
            with pytest.raises(error, match=text):
                DistributedOptimizer(sgd, wrong, lr=0.1)
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1\.0"):
        DistributedOptimizer(sgd, refs, lr=-1.0)
    with pytest.raises(UsageError, match="LBFGS needs a closure"):
        DistributedOptimizer(torch.optim.LBFGS, refs)
    with pytest.raises(UsageError, match="is no optimizer class"):
        DistributedOptimizer(sgd(part_parameters(), lr=1), refs)


def part_parameters():
    return list(far.Part(0).parameters())


def test_closures_and_unknown_contexts_are_refused():
    optimizer = DistributedOptimizer(torch.optim.SGD, refs_of(parts("w1")), lr=0.1)

    for call in (lambda: optimizer.step(lambda: None), lambda: optimizer.step(closure=print)):
        with pytest.raises(UsageError, match="takes no closure"):
            call()
    with pytest.raises(UsageError, match="Could not find autograd context with id: 12345"):
        optimizer.step(12345)
    with gradwire.context() as context:
        pass
    with pytest.raises(ContextClosed):
        optimizer.step(context)


def test_if_one_worker_cannot_step_none_does_and_the_error_says_who():
    made = parts("w0", "w1", "w2")
    optimizer = DistributedOptimizer(far.Moody, refs_of(made), lr=0.1)
    slope(made)
    optimizer.step()
    before, state = values_of(made), optimizer.state_dict()["state"]
    made[1].rpc_sync().slope(-1.0)

    with pytest.raises(
        StepFailed, match=r"s0\.\d+ failed, and no worker has stepped. w1: Val"
    ) as e:
        optimizer.step()

    assert e.value.stepped == e.value.unknown == ()
    assert all(torch.equal(a, b) for a, b in zip(values_of(made), before, strict=True))
    assert optimizer.state_dict()["state"] == state
    made[1].rpc_sync().slope()
    optimizer.step()  # and it can go on
    assert optimizer.state_dict()["state"][0]["steps"] == 2


def test_a_worker_that_is_gone_before_commit_is_named(workers):
    made = parts("w1", "w2")
    optimizer = DistributedOptimizer(torch.optim.SGD, refs_of(made), lr=0.1)
    slope(made)
    before = values_of(made)
    owner = workers[2].worker

    def give_up(event):
        if event.what == "prepared":
            worker, _, n = event.id[1:].partition(".")
            owner.part(OptimizerHost).locks.give_up(StepId(int(worker), int(n)))

    with (
        hearing(workers[0].worker, give_up),
        pytest.raises(StepFailed, match="w1 have stepped; w2 had aborted the step") as e,
    ):
        optimizer.step()

    assert e.value.stepped == ("w1",)
    after = values_of(made)
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[3], before[3])
