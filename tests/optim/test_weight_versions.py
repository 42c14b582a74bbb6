"""A step leaves to every graph the weights it was made with, and hides no write from torch."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwire.optim.weight_versions import WeightVersions


class Weights:
    """A parameter that is stepped here, by an optimizer that keeps its registration or not."""

    def __init__(self, *values: float, keeps: bool = True) -> None:
        self.versions = WeightVersions()
        self.p = nn.Parameter(torch.tensor(values, dtype=torch.float64))
        registration = self.versions.register([self.p])
        self.registration = registration if keeps else None

    def hooks(self):
        return self.versions.hooks()

    def step(self, by: float = 10.0) -> None:
        with torch.no_grad():
            self.versions.replace([(self.p, self.p * by)], self.registration)


@pytest.fixture(params=[True, False], ids=["kept", "not kept"])
def weights(request):
    return Weights(2.0, 3.0, keeps=request.param)


def test_the_gradient_is_that_of_the_weights_that_were_used(weights):
    with weights.hooks():
        y = (weights.p**3).sum()
    weights.step()

    y.backward()

    assert weights.p.grad.tolist() == [12, 27]
    assert weights.p.tolist() == [20, 30]


def test_a_view_of_a_parameter_keeps_its_storage_too():
    weights = Weights(1.0, 2.0)
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    with weights.hooks():
        y = nn.functional.linear(x, weights.p.view(1, 2)).sum()
    weights.step()
    weights.step()

    y.backward()

    assert x.grad.tolist() == [[1, 2]]
    assert weights.p.grad.tolist() == [3, 4]


@pytest.mark.parametrize("stepped", [False, True])
def test_the_second_order_is_exact_for_them_as_well(weights, stepped):
    with weights.hooks():
        y = (weights.p**3).sum()
        if stepped:
            weights.step()
        (first,) = torch.autograd.grad(y, weights.p, create_graph=True)
        weights.step()
        first.sum().backward()

    assert first.tolist() == [12, 27]
    assert weights.p.grad.tolist() == [12, 18]


def test_a_graph_made_without_the_hooks_fails_rather_than_be_wrong(weights):
    y = (weights.p**3).sum()
    weights.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_it_fails_too_if_others_are_under_the_hooks(weights):
    y = (weights.p**3).sum()
    entered, over = threading.Event(), threading.Event()

    def be_there():
        with weights.hooks():
            entered.set()
            over.wait(30)

    other = threading.Thread(target=be_there)
    other.start()
    entered.wait(30)
    weights.step()
    over.set()
    other.join(30)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


FROZEN = {
    "itself": lambda x, p: (x * p).sum(),
    "view": lambda x, p: (x * p.view(2)).sum(),
    "twice": lambda x, p: (x * p * p).sum(),
}
"""How a graph may use a parameter that requires no gradient."""


@pytest.mark.parametrize("use", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("thawed", ["before the step", "after it", "never"])
@pytest.mark.parametrize("hooked", [True, False])
def test_a_parameter_may_have_required_no_gradient_when_it_was_used(weights, use, thawed, hooked):
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    weights.p.requires_grad = False
    (expected,) = torch.autograd.grad(use(x, weights.p), x)
    with weights.hooks() if hooked else contextlib.nullcontext():
        y = use(x, weights.p)
    weights.p.requires_grad = thawed == "before the step"
    weights.step()
    weights.p.requires_grad = thawed != "never"

    if hooked:
        y.backward()
        assert torch.equal(x.grad, expected)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_a_graph_made_while_it_required_none_is_told_from_one_that_only_adds(weights):
    """The same count of references: of a graph that needs the weights, of one that does not."""
    y = weights.p.sum()
    weights.step()
    y.backward()
    assert weights.p.grad.tolist() == [1, 1]
    assert weights.p._version == 0

    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    weights.p.requires_grad = False
    y = (x * weights.p).sum()
    weights.p.requires_grad = True
    weights.step()
    assert weights.p._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_detached_parameter_keeps_its_values_beside_graphs_that_only_lead_to_it(weights):
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with weights.hooks():
        y = (x * weights.p.detach()).sum() + (weights.p**2).sum()
    weights.step()

    y.backward()

    assert x.grad.tolist() == [2, 3]
    assert weights.p.grad.tolist() == [4, 6]


class Interrupted(list):
    """Pairs to step. Something happens after the step has waited, and before it has begun."""

    def __init__(self, pairs, what):
        super().__init__(pairs)
        self.what, self.times = what, 0

    def __iter__(self):
        self.times += 1
        if self.times == 2:
            self.what()
        return super().__iter__()


def test_an_operator_without_the_hooks_that_began_during_a_step_is_told(weights):
    made = []

    def use():
        with torch.enable_grad():
            made.append((weights.p**3).sum())

    with torch.no_grad():
        pairs = Interrupted([(weights.p, weights.p * 10)], use)
        weights.versions.replace(pairs)

    assert len(made) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made[0].backward()


@pytest.mark.parametrize("stepped", [False, True])
def test_who_writes_into_a_parameter_that_a_graph_needs_is_told(weights, stepped):
    with weights.hooks():
        y = (weights.p**3).sum()
    with torch.no_grad():
        weights.p.mul_(2)
    if stepped:
        weights.step()

    with pytest.raises(RuntimeError, match=r"is at version 1; expected version 0 instead"):
        y.backward()


def test_a_write_after_the_step_is_no_affair_of_older_graphs(weights):
    with weights.hooks():
        y = (weights.p**3).sum()
    weights.step()
    with torch.no_grad():
        weights.p.mul_(2)

    y.backward()

    assert weights.p.grad.tolist() == [12, 27]


@pytest.mark.parametrize("make", [torch.clone, torch.exp], ids=["input", "output"])
def test_who_writes_into_any_other_tensor_is_told(weights, make):
    with weights.hooks():
        h = make(weights.p)
        y = h.square() if make is torch.clone else h.sum()
    with torch.no_grad():
        h.mul_(2)

    with pytest.raises(RuntimeError, match=r"\[torch.DoubleTensor \[2\]\] is at version 1; expec"):
        y.sum().backward()


def test_graphs_die_without_the_garbage_collector(weights):
    gc.disable()
    try:
        with weights.hooks():
            y = weights.p.exp()
            z = (y * y.view(2)).exp()
        ends = [weakref.ref(y), weakref.ref(z)]
        del y, z
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


def test_old_weights_are_let_go_of_with_the_last_graph_and_the_next_step(weights):
    with weights.hooks():
        y = (weights.p**2).sum()
    old = weights.p.untyped_storage()
    alive = weakref.ref(old)
    del old
    weights.step()
    y.backward()
    del y
    weights.step()

    assert alive() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_go_on_working(weights, reentrant):
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with weights.hooks():
        y = checkpoint(lambda x: (weights.p * x).square().sum(), x, use_reentrant=reentrant)
        y.backward()

    assert weights.p.grad.tolist() == [4, 6]
    assert x.grad.tolist() == [8, 18]


def test_hooks_of_the_user_s_own_go_on_working(weights):
    seen = []
    with (
        weights.hooks(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t),
    ):
        (weights.p**3).sum().backward()

    assert seen == [weights.p]
    assert weights.p.grad.tolist() == [12, 27]


def test_custom_functions_and_second_derivatives_are_as_without():
    weights = Weights(0.5, -0.3)
    x = torch.tensor([0.2, 0.7], dtype=torch.float64, requires_grad=True)

    def f(x, p):
        with weights.hooks():
            return ((x * 2).exp() * p.sin() * x).tanh() * p.view(2)

    assert torch.autograd.gradcheck(f, (x, weights.p))
    assert torch.autograd.gradgradcheck(f, (x, weights.p))


@pytest.mark.parametrize("change", ["dtype", "frozen", "nothing"])
def test_no_graph_is_taken_for_one_that_holds_the_parameter(weights, change):
    """The version of a parameter is raised for graphs that hold it, and for nothing else."""
    y = weights.p.sum()  # holds the accumulator, not the parameter
    if change == "dtype":
        weights.p.data = weights.p.data.float()  # torch makes another accumulator
        y = weights.p.sum()
    elif change == "frozen":
        weights.p.requires_grad_(False)
        weights.p.requires_grad_(True)
    before = weights.p._version

    weights.step()

    assert weights.p._version == before
    y.backward()


def test_a_graph_that_was_made_while_it_was_frozen_holds_the_parameter(weights):
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    weights.p.requires_grad_(False)
    y = (x * weights.p).sum()
    weights.p.requires_grad_(True)

    weights.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_parameter_that_shares_its_storage_is_written_in_place():
    flat = torch.tensor([1.0, 2.0, 3.0])
    versions, p = WeightVersions(), nn.Parameter(flat[:2])
    versions.register([p])

    with torch.no_grad():
        versions.replace([(p, p * 10)])

    assert flat.tolist() == [10, 20, 3]


def test_nothing_is_hooked_where_no_parameter_is_left():
    versions = WeightVersions()
    p = nn.Parameter(torch.ones(2))
    versions.register([p])
    del p

    with versions.hooks():
        torch.func.grad(lambda x: (x**2).sum())(torch.ones(2))


ALIASES = {
    "detach": lambda p: p.detach(),
    "view": lambda p: p.view(-1).detach(),
    "data": lambda p: p.data,
    "state_dict": lambda p: nn.ParameterList([p]).state_dict()["0"],
    "part": lambda p: p.detach()[:1],
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
}
"""What a program may keep of a parameter's storage; torch counts writes by all but two of them."""


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("use", [lambda p: p**3, lambda p: p.view(2) ** 3], ids=["itself", "view"])
@pytest.mark.parametrize("kept_before", [True, False])
def test_a_write_to_storage_that_a_step_has_left_reaches_no_graph(weights, alias, use, kept_before):
    kept = alias(weights.p) if kept_before else None
    with weights.hooks():
        y = use(weights.p).sum()
    kept = alias(weights.p) if kept is None else kept
    weights.step()
    kept.mul_(100)

    y.backward()

    assert kept[0] == 200
    assert weights.p.grad.tolist() == [12, 27]
    assert weights.p.tolist() == [20, 30]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", ["detach", "view", "state_dict", "part"])
def test_a_write_through_an_alias_before_the_step_is_told(weights, kind, stepped):
    kept = ALIASES[kind](weights.p)
    with weights.hooks():
        y = (weights.p**3).sum()
    kept.mul_(100)
    if stepped:
        weights.step()

    with pytest.raises(RuntimeError, match=r"is at version 1; expected version 0 instead"):
        y.backward()


def test_a_view_from_before_a_step_keeps_what_it_has_read(weights):
    old = weights.p.view(-1)
    alias = weights.p.detach()
    weights.step()
    with weights.hooks():
        y = (old**3).sum()
    weights.step()
    with torch.no_grad():
        alias.mul_(100)

    y.backward()

    assert weights.p.grad.tolist() == [12, 27]


@pytest.mark.parametrize(
    "use",
    [lambda p: torch.view_as_real(p), lambda p: p.conj().imag, lambda p: p[:, None].expand(2, 3)],
    ids=["real", "negative", "expanded"],
)
def test_views_of_every_kind_are_kept_from_such_writes(use):
    versions = WeightVersions()
    p = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    versions.register([p])
    x = torch.ones_like(use(p).detach()).requires_grad_()
    (expected,) = torch.autograd.grad((x * use(p)).abs().sum(), x)
    alias = p.detach()
    with versions.hooks():
        y = (x * use(p)).abs().sum()
    with torch.no_grad():
        versions.replace([(p, p * 10)])
        alias.mul_(100j)

    y.backward()

    assert torch.equal(x.grad, expected)


def test_a_sparse_parameter_is_kept_from_such_writes_too():
    versions = WeightVersions()
    p = nn.Parameter(torch.tensor([[2.0, 0.0]]).to_sparse())
    versions.register([p])
    x = torch.ones(2, 1, requires_grad=True)
    alias = p.detach()
    with versions.hooks():
        y = torch.sparse.mm(p, x).sum()
    with torch.no_grad():
        versions.replace([(p, (p * 10).detach())])
        alias.mul_(100)

    y.backward()

    assert x.grad.tolist() == [[2], [0]]


def test_nothing_is_copied_where_nobody_else_looks(weights):
    first, second = weights.p.data_ptr(), (weights.p * 10).detach()
    with weights.hooks():
        y = weights.p**3
    with torch.no_grad():
        weights.versions.replace([(weights.p, second)])  # a stand-in shares it from now on
    with weights.hooks():
        z = weights.p**3
    weights.step()

    assert y.grad_fn._saved_self.data_ptr() == first
    assert z.grad_fn._saved_self.data_ptr() == second.data_ptr()


def test_a_graph_whose_weights_cannot_be_copied_fails_if_they_are_written(weights, monkeypatch):
    def no_memory(_):
        raise torch.OutOfMemoryError

    alias = weights.p.detach()
    with weights.hooks():
        y, z = (weights.p**3).sum(), (weights.p**2).sum()
    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "clone", no_memory)
        weights.step()

    y.backward()
    assert weights.p.grad.tolist() == [12, 27]

    alias.mul_(100)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


class Nested(torch.autograd.Function):
    """Its backward runs another one, many times inside each other."""

    @staticmethod
    def forward(ctx, x, times, innermost):
        ctx.times, ctx.innermost = times, innermost
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        nested(ctx.times - 1, ctx.innermost) if ctx.times else ctx.innermost()
        return gradient, None, None


def nested(times, innermost):
    with torch.enable_grad():
        Nested.apply(torch.ones(1, requires_grad=True), times, innermost).backward()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_thread_of_the_engine_saves_a_parameter_without_a_frame(weights, hooked):
    """An accelerator's thread, or that of a backward which is nested too deep, as here."""
    with weights.hooks() if hooked else contextlib.nullcontext():
        y = (weights.p**3).sum()
    threads = {threading.get_ident()}
    y.grad_fn.register_prehook(lambda _: threads.add(threading.get_ident()))
    firsts = []

    with weights.hooks():
        nested(60, lambda: firsts.extend(torch.autograd.grad(y, weights.p, create_graph=True)))
        firsts[0].sum().backward()

    assert len(threads) == 2
    assert weights.p.grad.tolist() == [12, 18]
