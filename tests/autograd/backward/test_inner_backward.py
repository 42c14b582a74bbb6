"""Functions that run a backward of their own: into the map and back out of it, as into `.grad`.

Each program is run with `loss.backward()` in one process too, where all weights are local: what
`.grad` has there, the map has here.
"""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left, eventually

pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True:UserWarning"
)
HERE = sys.modules[__name__]
WEIGHTS: dict[str, torch.Tensor] = {}
MADE: list[weakref.ref] = []
"""The leaves that Functions have made for their own backwards."""
LOCAL = [False]


@pytest.fixture(scope="module")
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(workers):
    begin_anew()
    yield
    begin_anew()
    assert_nothing_left(workers)


def begin_anew():
    WEIGHTS.clear()
    MADE.clear()
    for n, name in enumerate("abcd"):
        WEIGHTS[name] = torch.tensor([n + 2.0, 0.5 + n], dtype=torch.float64, requires_grad=True)


class Again(Function):
    """A checkpoint as people write them: the forward once more, and a backward over it."""

    @staticmethod
    def forward(ctx, how, block, x):
        ctx.how, ctx.block = how, block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            MADE.append(weakref.ref(leaf))
            y = ctx.block(leaf)
        if ctx.how == "tensor":
            y.backward(gradient)
        elif ctx.how == "parts":
            with torch.enable_grad():
                first, second = y[:1], y[1:]
            first.backward(gradient[:1], retain_graph=True)
            second.backward(gradient[1:])
        elif ctx.how == "inputs":
            torch.autograd.backward([y], [gradient], inputs=[leaf, WEIGHTS["b"]])
        elif ctx.how == "edge":
            edge = torch.autograd.graph.get_gradient_edge(y)
            torch.autograd.backward([edge], [gradient])
        elif ctx.how == "grad":
            return None, None, *torch.autograd.grad([y], [leaf], [gradient])
        else:
            torch.autograd.backward([y], [gradient])
        return None, None, leaf.grad


def again(block, x, how="functional"):
    if how == "checkpoint":
        return checkpoint(block, x, use_reentrant=True, preserve_rng_state=False)
    return Again.apply(how, block, x)


def call(to, function, *args):
    if LOCAL[0]:
        return function(*args)
    return gw.rpc_sync(to, function, args=args)


HOWS = ["functional", "tensor", "parts", "edge", "checkpoint"]


# -- what runs on the workers


def times_a(x):
    return x * WEIGHTS["a"]


def times_b(x):
    return x * WEIGHTS["b"] * WEIGHTS["b"] + WEIGHTS["a"]


def beyond(x):
    return call("w2", times_c, x * WEIGHTS["b"]) * WEIGHTS["a"]


def times_c(x):
    return x * WEIGHTS["c"]


def times_d(x):
    return x * WEIGHTS["d"]


def beyond_again(x):
    return again(times_d, call("w2", again_c, x * WEIGHTS["b"]))


def again_c(x):
    return again(times_c, x)


def again_b(x, how="functional"):
    return again(times_b, x, how)


def again_beyond(x, how="functional"):
    return again(beyond, x, how)


def again_both(x, how="functional"):
    """Weights inside and outside, and one behind two of them."""
    return again(times_a, again(times_b, x, how) * WEIGHTS["a"] * WEIGHTS["c"], how) + WEIGHTS["b"]


def nested(x, how="functional"):
    return again(lambda y: again(times_b, y * WEIGHTS["c"], how) * WEIGHTS["a"], x, how)


def nested_in_grad(x, _):
    return again(lambda y: again(times_b, y * WEIGHTS["c"]) * WEIGHTS["a"], x, "grad")


def deep(x, how):
    """More levels than the engine has room for in one thread."""
    block = times_b
    for _ in range(70):
        block = lambda y, inner=block: again(inner, y, how)  # noqa: E731
    return block(x)


BLOCKS = [again_b, again_beyond, again_both, nested]


# -- one process, and several


def leaf():
    return torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)


def expected(block, *args, times=1):
    """The gradients of plain torch: of x, and of the weights."""
    begin_anew()
    LOCAL[0] = True
    try:
        x = leaf()
        for _ in range(times):
            (block(x * 2, *args) ** 2).sum().backward()
    finally:
        LOCAL[0] = False
    gradients = x.grad, {name: weight.grad for name, weight in WEIGHTS.items()}
    begin_anew()
    return gradients


def mapped(workers, context, is_crossing):
    """By name, what the maps of all workers have together.

    Where a backward inside crosses, the context still holds the leaves that were made for it.
    """
    found = {}
    for member in workers:
        for weight, gradient in member.run(gradients_of, context).items():
            names = [name for name, known in {**WEIGHTS, "x": X[0]}.items() if known is weight]
            if is_crossing and not names:
                continue
            (name,) = names
            assert name not in found, "two workers have a gradient of one weight"
            found[name] = gradient
    return found


def gradients_of(context):
    """None on a worker that the context did not reach."""
    try:
        return gw.get_gradients(context)
    except gw.UsageError:
        return {}


X: list[torch.Tensor] = []


def assert_mapped(workers, block, *args, to="w1", times=1):
    by_x, by_weight = expected(block, *args, times=times)
    X[:] = [leaf()]

    def program():
        with gw.context() as context:
            for _ in range(times):
                y = gw.rpc_sync(to, block, args=(X[0] * 2, *args)) if to else block(X[0] * 2, *args)
                gw.backward(context, [(y**2).sum()])
            return mapped(workers, context, block in (again_beyond, beyond_again))

    found = workers[0].run(program)
    assert torch.equal(found.pop("x"), by_x)
    want = {name: gradient for name, gradient in by_weight.items() if gradient is not None}
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.equal(found[name], gradient), name
    assert X[0].grad is None
    assert [weight.grad for weight in WEIGHTS.values()] == [None] * 4
    assert eventually(lambda: not undecided(workers))


@pytest.mark.parametrize("to", [None, "w1"], ids=["root", "served"])
@pytest.mark.parametrize("how", HOWS)
def test_the_map_gets_what_is_behind_a_backward_inside(workers, how, to):
    assert_mapped(workers, again_b, how, to=to)


@pytest.mark.parametrize("to", [None, "w1"], ids=["root", "served"])
@pytest.mark.parametrize("block", [again_both, nested, nested_in_grad])
def test_weights_inside_and_outside_add_up_in_the_map(workers, block, to):
    assert_mapped(workers, block, "functional", to=to)


@pytest.mark.parametrize("to", [None, "w1"], ids=["root", "served"])
@pytest.mark.parametrize("how", HOWS)
def test_a_backward_inside_that_crosses_goes_to_the_map_there_too(workers, how, to):
    assert_mapped(workers, again_beyond, how, to=to)


def test_a_backward_inside_that_meets_another_elsewhere(workers):
    assert_mapped(workers, beyond_again, to=None)
    assert_mapped(workers, beyond_again)


@pytest.mark.parametrize("block", BLOCKS)
def test_several_backwards_of_one_context_add_up(workers, block):
    assert_mapped(workers, block, times=3)
    assert_mapped(workers, block, to=None, times=3)


@pytest.mark.parametrize("to", [None, "w1"], ids=["root", "served"])
def test_backwards_inside_each_other_to_any_depth(workers, to):
    assert_mapped(workers, deep, "functional", to=to)


def test_a_backward_inside_towards_inputs_fills_these_only(workers):
    assert_mapped(workers, again_b, "inputs")


def test_grad_as_it_was_is_as_it_was(workers):
    def program():
        with gw.context() as context:
            gw.backward(context, [gw.rpc_sync("w1", again_both, args=(leaf(),)).sum()])

    befores = {}
    for name, weight in WEIGHTS.items():
        befores[name] = weight.grad = torch.full((2,), 7.0, dtype=torch.float64)
    workers[0].run(program)
    for name, weight in WEIGHTS.items():
        assert weight.grad is befores[name]
        assert weight.grad.tolist() == [7, 7]


def watched(x):
    """Hooks on weights that are inside and outside."""
    for name in "ab":
        hook = lambda p, name=name: SEEN.append((name, p.grad.tolist()))  # noqa: E731
        WEIGHTS[name].register_post_accumulate_grad_hook(hook)
        WEIGHTS[name].register_hook(lambda g, name=name: SEEN.append((name, g.tolist())))
    return again_both(x)


SEEN: list = []


@pytest.mark.parametrize("to", [None, "w1"], ids=["root", "served"])
def test_hooks_of_weights_inside_see_the_gradient_of_the_context(workers, to):
    SEEN.clear()
    expected(watched)
    alone = list(SEEN)
    SEEN.clear()

    def program():
        with gw.context() as context:
            x = leaf() * 2
            y = gw.rpc_sync(to, watched, args=(x,)) if to else watched(x)
            gw.backward(context, [(y**2).sum()])

    workers[0].run(program)
    assert alone == SEEN != []


def test_an_optimizer_over_the_map_steps_what_is_behind_a_backward_inside(workers):
    _, by_weight = expected(again_b)

    def program():
        weight = gw.remote("w1", weight_b)
        optimizer = gw.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        with gw.context() as context:
            loss = (gw.rpc_sync("w1", again_b, args=(leaf() * 2,)) ** 2).sum()
            gw.backward(context, [loss])
            optimizer.step(context)

    before = WEIGHTS["b"].detach().clone()
    workers[0].run(program)
    assert torch.equal(WEIGHTS["b"], before - 0.5 * by_weight["b"])


def weight_b():
    return WEIGHTS["b"]


@pytest.mark.parametrize("into_map", [False, True], ids=["grad", "map"])
@pytest.mark.parametrize("to", [None, "w1"], ids=["root", "served"])
def test_leaves_that_a_function_made_for_itself_die_with_it(workers, to, into_map):
    alive = []

    def look(_):
        gc.collect()
        alive.append([made() is not None for made in MADE])

    def program():
        with gw.context() as context:
            x = leaf()
            start = x * 2
            start.register_hook(look)
            y = gw.rpc_sync(to, again_both, args=(start,)) if to else again_both(start)
            gw.backward(context, [y.sum()]) if into_map else y.sum().backward()

    workers[0].run(program)
    assert len(MADE) == 2
    assert alive == [[False, False]]


# -- passes that fail


def fail(_):
    raise ValueError("refused by a hook")


def fails_at_last(block, x, *args):
    """When the block has run its backward, a hook on its input fails."""
    x = x * 1
    x.register_hook(fail)
    return globals()[block](x, *args)


@pytest.mark.parametrize("to", [None, "w1"], ids=["root", "served"])
@pytest.mark.parametrize("before", [None, 5.0])
@pytest.mark.parametrize("block", ["again_b", "again_both", "nested", "again_beyond"])
def test_a_failed_pass_into_the_map_leaves_nothing_of_a_backward_inside(workers, block, before, to):
    def program():
        with gw.context() as context:
            if before is not None:
                gw.backward(context, [gw.rpc_sync("w1", block_of(block), args=(leaf(),)).sum()])
                if to is None:
                    gw.backward(context, [globals()[block](leaf()).sum()])
            known = [member.run(values_of, context) for member in workers]
            x = leaf()
            if to is None:
                loss = fails_at_last(block, x).sum()
            else:
                loss = gw.rpc_sync(to, fails_at_last, args=(block, x)).sum()
            with pytest.raises(ValueError, match="refused by a hook"):
                gw.backward(context, [loss])
            assert [member.run(values_of, context) for member in workers] == known

    workers[0].run(program)
    assert [weight.grad for weight in WEIGHTS.values()] == [None] * 4


def block_of(name):
    return globals()[name]


def values_of(context):
    return {id(key): value.tolist() for key, value in gradients_of(context).items()}


@pytest.mark.parametrize("before", [None, 5.0])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("block", ["again_b", "again_both", "nested", "again_beyond"])
def test_a_failed_plain_pass_leaves_nothing_of_a_backward_inside(workers, block, how, before):
    if before is not None:
        for weight in WEIGHTS.values():
            weight.grad = torch.full_like(weight, before)
    known = {name: weight.grad for name, weight in WEIGHTS.items()}

    def program():
        with gw.context():
            loss = gw.rpc_sync("w1", fails_at_last, args=(block, leaf(), how)).sum()
            with pytest.raises(ValueError, match="refused by a hook"):
                loss.backward()

    workers[0].run(program)
    for name, weight in WEIGHTS.items():
        assert weight.grad is known[name]
        assert before is None or weight.grad.tolist() == [before, before]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("levels", [1, 2])
def test_a_failed_backward_of_the_root_leaves_nothing_of_one_inside_elsewhere(workers, how, levels):
    """Its own leaves keep what a failed backward leaves them in one process."""
    for weight in WEIGHTS.values():
        weight.grad = torch.full_like(weight, 5)

    def program(fails):
        with gw.context():
            x = leaf() * 1
            if fails:
                x.register_hook(fail)
            y = again(beyond, x, how) if levels == 1 else again(lambda x: again(beyond, x), x, how)
            y.sum().backward()

    with pytest.raises(ValueError, match="refused by a hook"):
        workers[0].run(program, True)
    assert WEIGHTS["c"].grad.tolist() == [5, 5]
    assert WEIGHTS["a"].grad.tolist() != [5, 5]
    workers[0].run(program, False)
    begin = WEIGHTS["c"].grad.tolist()
    assert begin == [5 + 1 * 3 * 2, 5 + 3 * 1.5 * 0.5]
    assert eventually(lambda: not undecided(workers))


def undecided(workers):
    """What passes are neither kept nor taken back, on any worker."""
    return [
        passes
        for member in workers
        for passes in (
            member.worker.engine.coordinator._outcomes.undecided,
            member.worker.engine.passes._by_id,
        )
        if passes
    ]


def test_a_failed_grad_leaves_nothing_of_a_backward_inside(workers):
    def program():
        with gw.context():
            x = leaf()
            loss = gw.rpc_sync("w1", fails_at_last, args=("again_b", x)).sum()
            with pytest.raises(ValueError, match="refused by a hook"):
                torch.autograd.grad(loss, [x])

    workers[0].run(program)
    assert [weight.grad for weight in WEIGHTS.values()] == [None] * 4


@pytest.mark.parametrize("into_map", [False, True], ids=["grad", "map"])
def test_a_function_may_catch_what_a_backward_inside_raises(workers, into_map):
    def program():
        with gw.context() as context:
            loss = gw.rpc_sync("w1", caught, args=(leaf(),)).sum()
            gw.backward(context, [loss]) if into_map else loss.backward()
            return workers[1].run(gw.get_gradients, context)

    found = workers[0].run(program)
    assert found.keys() == ({WEIGHTS["a"]} if into_map else set())
    assert (WEIGHTS["a"].grad is None) == into_map


class Catches(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            y = WEIGHTS["b"] * 2
        y.register_hook(fail)
        with pytest.raises(ValueError, match="refused by a hook"):
            y.backward(gradient)
        return gradient


def caught(x):
    return Catches.apply(x) * WEIGHTS["a"]


def test_nothing_is_left_of_runs_and_leaves(workers):
    from gradwire.autograd.undo import undo_log

    assert_mapped(workers, again_beyond, "functional")
    assert undo_log._by_run == {}
    gc.collect()
    begin_anew()
    assert eventually(lambda: gc.collect() is not None and undo_log._by_run == {})


def checkpointed_a(x):
    return checkpoint(times_a, x, use_reentrant=True, preserve_rng_state=False)


def again_on_w2(x):
    return again(lambda y: call("w2", checkpointed_a, y), x, "tensor")


@pytest.mark.parametrize("there", [False, True], ids=["begun here", "begun there"])
@pytest.mark.parametrize("is_local", [True, False], ids=["one process", "workers"])
def test_a_checkpoint_behind_a_backward_inside_of_grad_is_refused(workers, is_local, there):
    """It would add to a leaf that was not asked for; torch refuses it where it can see it."""

    def program():
        with gw.context():
            x = leaf()
            y = call("w1", again_on_w2, x) if there else again_on_w2(x)
            with pytest.raises(RuntimeError, match="checkpoint is incompatible with"):
                torch.autograd.grad(y.sum(), [x])

    LOCAL[0] = is_local
    try:
        workers[0].run(program)
    finally:
        LOCAL[0] = False
    assert WEIGHTS["a"].grad is None


# -- a backward on the worker that the Function calls


def weighted_again(x, gradient):
    """Runs on another worker, in the backward of `Far`."""
    x = x.detach().requires_grad_()
    (x * WEIGHTS["a"]).backward(gradient)
    return x.grad


def asked_further(x, gradient):
    return gw.rpc_sync("w2", weighted_again, args=(x, gradient))


class Far(Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return x * WEIGHTS["a"].detach()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            return None, gw.rpc_sync("w1", ctx.function, args=(x, gradient)).detach()


@pytest.mark.parametrize("function", [weighted_again, asked_further])
def test_a_called_function_may_not_miss_the_map(workers, function):
    def program():
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        with gw.context() as context_id:
            with pytest.raises(gw.UsageError, match="would not be in the context"):
                gw.backward(context_id, [Far.apply(function, x).sum()])
            assert gw.get_gradients(context_id) == {}
        assert WEIGHTS["a"].grad is None
        Far.apply(function, x).sum().backward()
        return x.grad, WEIGHTS["a"].grad

    gradients = workers[0].run(program)
    assert torch.equal(gradients[0], WEIGHTS["a"].detach())
    assert torch.equal(gradients[1], torch.ones(2, dtype=torch.float64))
