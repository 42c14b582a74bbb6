"""Plain torch over several workers: each program runs in one process too, with the same outcome.

A program is a function of this file. `call` runs a function on another worker, or right here when
the program runs in one process; `weight` is the parameter of the worker whose code asks. What a
program returns is compared, and so are the gradients of every worker's weight and how often `note`
was called.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.testing import cluster
from tests.hearing import hearing
from tests.leftovers import assert_nothing_left

HERE = sys.modules[__name__]
_one_process: ContextVar[str | None] = ContextVar("the worker played in one process", default=None)


def vector(start):
    return torch.tensor([start, start + 1, -start], dtype=torch.float64)


def leaf(start=1):
    return vector(start).requires_grad_()


class World:
    """What the workers have, made anew for each run of a program."""

    def __init__(self):
        self.weights = {f"w{n}": torch.nn.Parameter(vector(n + 2)) for n in range(3)}
        self.kept = {}
        self.counts = Counter()
        self.alive = []
        self.multi = []
        """handles of multi-grad hooks: one holds the nodes it is on, until it is removed"""

    def gradients(self):
        return [weight.grad for weight in self.weights.values()]


WORLD = World()


@pytest.fixture(scope="module")
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(workers):
    yield
    begin_anew()
    assert_nothing_left(workers)


def begin_anew():
    global WORLD
    for handle in WORLD.multi:
        handle.remove()
    WORLD = World()
    return WORLD


# -- one program, two worlds


def in_one_process(program):
    token = _one_process.set("w0")
    try:
        return program()
    finally:
        _one_process.reset(token)


def over_workers(program):
    """As programs are written: in no context."""
    return program()


def in_context(program):
    with gw.context():
        return program()


def flat(value):
    return [v for part in value for v in flat(part)] if isinstance(value, list | tuple) else [value]


def assert_same(workers, program):
    """Run it in one process, over workers, and there in a context: compare all that can be seen."""
    outcomes = []
    for run in (
        lambda: in_one_process(program),
        lambda: workers[0].run(over_workers, program),
        lambda: workers[0].run(in_context, program),
    ):
        world = begin_anew()
        seen = [v.detach() if isinstance(v, torch.Tensor) else v for v in flat(run())]
        outcomes.append((seen, world.gradients(), world.counts))
    in_one, *others = outcomes
    for other in others:
        assert_equal(other, in_one)
    return in_one


def assert_equal(outcome, in_one):
    (there, there_gradients, there_counts), (here, here_gradients, here_counts) = outcome, in_one
    assert len(there) == len(here)
    for got, want in zip(there + there_gradients, here + here_gradients, strict=True):
        if isinstance(want, torch.Tensor):
            assert isinstance(got, torch.Tensor), f"{got}, in one process {want}"
            assert torch.equal(got, want), f"{got}, in one process {want}"
        else:
            assert got == want
    assert there_counts == here_counts


# -- what programs are written with


def here():
    return _one_process.get() or gw.get_worker_info().name


def weight():
    return WORLD.weights[here()]


def note(what):
    WORLD.counts[what] += 1


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: copied(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(part) for part in value)
    return value


def call(to, function, *args):
    if _one_process.get() is None:
        return gw.rpc_sync(to, function, args=args)
    token = _one_process.set(to)
    try:
        return copied(function(*copied(args)))
    finally:
        _one_process.reset(token)


def begin(to, function, *args):
    """Like `call`, but gives something to wait for."""
    if _one_process.get() is None:
        return gw.rpc_async(to, function, args=args).wait
    result = call(to, function, *args)
    return lambda: result


def fetch(to, function, *args):
    """By way of a reference."""
    if _one_process.get() is None:
        return gw.remote(to, function, args=args).to_here()
    return call(to, function, *args)


# -- what runs on the workers


def weighted(x):
    return x * weight()


def weighted_over(path, x):
    return call(path[0], weighted_over, path[1:], x * weight()) if path else x * weight()


def twice_and_thrice(x):
    return x * 2 * weight(), x * 3


def ping(times, back, x):
    return x * weight() if times == 0 else call(back, ping, times - 1, here(), x + 1) * 2


def back_to(caller, x):
    return call(caller, weighted, x * 2) + x


def of_all(values):
    return {name: value * weight() for name, value in values.items()}


def summed(values):
    return sum(values) * weight()


def product(x, y):
    return x * y * weight()


def keep(x):
    WORLD.kept[here()] = x * weight()


def kept():
    return WORLD.kept[here()] * 2


def in_place(x):
    x.mul_(weight())
    x += 1
    return x * x


def square_fetched(rref):
    return rref.to_here() * weight()


def fails(x):
    weighted_over(["w2"], x)
    raise ValueError("on purpose")


def backward_there(x):
    (weighted_over(["w2", "w0"], x) ** 2).sum().backward()


def slope_there(x):
    y = weighted_over(["w2"], x)
    (slope,) = torch.autograd.grad((y * y).sum(), [x])
    return slope


def cubed(x):
    return x**3 * weight()


def sine(x):
    return torch.sin(x) * weight()


def hooked(x):
    """Hooks of every kind on one worker; the weight takes part three times."""
    name = here()
    y = x * weight()
    z = y * weight() + y.sum() * weight()
    y.register_hook(lambda g: note(f"tensor hook on {name} at {g.sum().item()}"))
    z.grad_fn.register_prehook(lambda g: note(f"node pre hook on {name}"))
    z.grad_fn.register_hook(lambda *g: note(f"node post hook on {name}"))
    multi = torch.autograd.graph.register_multi_grad_hook(
        [y, z], lambda gs: note(f"multi-grad hook on {name}")
    )
    WORLD.multi.append(multi)
    return z


def watch_weight():
    """Hooks of every kind on the leaf of a worker. What they see is noted too."""
    w, name = weight(), here()
    w.register_hook(lambda g: note(f"leaf hook on {name} at {g.sum().item()}"))
    w.register_post_accumulate_grad_hook(
        lambda p: note(f"post-accumulate hook on {name} at {p.grad.sum().item()}")
    )
    accumulator = w.view_as(w).grad_fn.next_functions[0][0]
    accumulator.register_prehook(lambda g: note(f"accumulator pre hook on {name}"))
    accumulator.register_hook(lambda *g: note(f"accumulator hook on {name}"))
    multi = torch.autograd.graph.register_multi_grad_hook(
        [w], lambda gs: note(f"multi-grad hook of the leaf on {name}")
    )
    WORLD.alive.append(accumulator)
    WORLD.multi.append(multi)


class Noted(torch.autograd.Function):
    """A function of the user's own; it counts its backwards."""

    @staticmethod
    def forward(ctx, name, x):
        ctx.name = name
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        note(ctx.name)
        return None, gradient * 2 * x


def own_function(x):
    return Noted.apply(f"user backward on {here()}", x * weight())


def checkpointed(reentrant, x):
    note("forward")
    return (
        checkpoint(recomputed, here(), x, use_reentrant=reentrant, preserve_rng_state=False)
        * weight()
    )


def recomputed(name, x):
    """Called again by backward, which in one process does not know whose code it runs."""
    note(f"recomputed on {name}")
    token = None if _one_process.get() is None else _one_process.set(name)
    try:
        return call("w2", weighted, x * weight()) ** 2
    finally:
        if token is not None:
            _one_process.reset(token)


def modes_and_product(x):
    return torch.is_grad_enabled(), x * weight()


# -- backward


def test_backward_fills_grad_on_every_worker(workers):
    def program():
        x = leaf()
        (call("w1", weighted_over, ["w2", "w0", "w1"], x) ** 2).sum().backward()
        return x.grad

    _, gradients, _ = assert_same(workers, program)
    assert all(gradient is not None for gradient in gradients)


def test_backward_may_be_called_within_a_served_function(workers):
    def program():
        x = leaf()
        call("w1", backward_there, x * 2)
        return x.grad

    _, gradients, _ = assert_same(workers, program)
    assert all(gradient is not None for gradient in gradients)


def test_grad_may_be_called_within_a_served_function(workers):
    def program():
        x = leaf()
        slope = call("w1", slope_there, x * 2)
        return slope, slope.requires_grad, x.grad

    _, gradients, _ = assert_same(workers, program)
    assert gradients == [None] * 3


def test_backward_with_several_roots_and_gradients_of_their_own(workers):
    def program():
        x = leaf()
        a, b = call("w1", twice_and_thrice, x)
        torch.autograd.backward([a, b * weight(), a.sum()], [vector(5), vector(7), None])
        return x.grad

    assert_same(workers, program)


def test_backward_of_a_tensor_with_a_gradient_of_its_own(workers):
    def program():
        x = leaf()
        call("w1", weighted, x).backward(vector(9))
        return x.grad

    assert_same(workers, program)


def test_backward_towards_inputs_fills_these_only(workers):
    def program():
        x, y = leaf(1), leaf(2)
        call("w1", product, x, y).sum().backward(inputs=[x])
        return x.grad, y.grad

    _, gradients, _ = assert_same(workers, program)
    assert gradients == [None] * 3


@pytest.mark.parametrize("first", ["near", "far"])
def test_backward_towards_a_received_value_fills_it_and_stops_there(workers, first):
    """Whether the engine meets this value first or another one that leads to it."""

    def program():
        x = leaf()
        y = call("w1", own_function, x)
        z = call("w2", own_function, y)
        loss = (y * 2 + z).sum() if first == "near" else (z + y * 2).sum()
        loss.backward(inputs=[y])
        return y.grad, x.grad

    _, gradients, counts = assert_same(workers, program)
    assert gradients == [None] * 3
    assert counts == {"user backward on w2": 1}


def test_backward_towards_a_received_value_alone_asks_nobody(workers):
    def program():
        x = leaf()
        y = call("w1", own_function, x)
        (y * y).sum().backward(inputs=[y], retain_graph=True)
        y.sum().backward(inputs=[y])
        return y.grad, x.grad

    _, gradients, counts = assert_same(workers, program)
    assert gradients == [None] * 3
    assert counts == {}


def test_a_worker_behind_a_received_input_hears_nothing(workers):
    begin_anew()
    sent = []

    def program():
        y = call("w1", own_function, leaf())
        z = call("w2", own_function, y)
        with hearing(workers[0].worker, lambda event: sent.append(event.line("w0"))):
            (z * y).sum().backward(inputs=[y])

    workers[0].run(over_workers, program)
    (event,) = [event for event in sent if "gradients" in event]
    assert event.startswith("w0>w2 gradients e2.")


def test_backward_towards_the_loss_itself_that_was_received(workers):
    def program():
        y = call("w1", torch.sum, leaf() * 2)
        y.backward(inputs=[y])
        return y.grad

    assert_same(workers, program)


@pytest.mark.parametrize("of", ["xy", "yx", "yw", "zyx", "z", "zx"])
def test_backward_towards_received_values_and_leaves(workers, of):
    """Remote leaves are not among the inputs, whatever is."""

    def program():
        x = leaf()
        y = call("w1", own_function, x)
        z = call("w2", product, y, weight())
        a = call("w1", own_function, z * y)
        known = {"x": x, "y": y, "z": z, "w": weight()}
        ((a + z) * x * weight()).sum().backward(inputs=[known[name] for name in of])
        return x.grad, weight().grad, [known[name].grad for name in of]

    _, gradients, _ = assert_same(workers, program)
    assert gradients[1:] == [None, None]


def towards_received_there(others, x):
    """A backward of the callee's own towards what it was called with, and what it has received."""
    y = call("w2", own_function, x)
    inputs = [x, y, weight()] if others else [x]
    (call("w2", weighted, y) * y * weight()).sum().backward(inputs=inputs)
    return x.grad, y.grad if others else None


@pytest.mark.parametrize("others", [False, True])
def test_backward_towards_received_values_within_a_served_function(workers, others):
    def program():
        x = leaf()
        first, second = call("w1", towards_received_there, others, x * 2)
        return first, second, x.grad

    _, gradients, _ = assert_same(workers, program)
    assert [gradient is None for gradient in gradients] == [True, not others, True]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("create", [False, True])
def test_a_pass_follows_a_backward_towards_a_received_value(workers, create):
    """The first leaves nothing that the second could trip over, also of second order."""

    def program():
        x = leaf()
        y = call("w1", cubed, x)
        loss = (call("w2", cubed, y) * y).sum()
        loss.backward(inputs=[y], retain_graph=True, create_graph=create)
        slope, y.grad = y.grad, None
        (slope.sum() if create else loss).backward()
        return slope, x.grad

    assert_same(workers, program)


def test_inputs_that_are_received_and_changed_in_place(workers):
    def program():
        x = leaf()
        y = call("w1", own_function, x)
        y.mul_(2)
        z = y * weight()
        y.retain_grad()
        z.sum().backward(inputs=[y])
        return y.grad, x.grad

    assert_same(workers, program)


def test_hooks_of_a_received_input_run_as_in_one_process(workers):
    def program():
        y = call("w1", own_function, leaf())
        y.register_hook(lambda g: note(f"hook at {g.sum().item()}") or g * 3)
        (y * call("w2", weighted, y)).sum().backward(inputs=[y])
        return y.grad

    _, _, counts = assert_same(workers, program)
    assert sum(counts.values()) == 1


def test_the_result_of_a_call_itself_may_be_the_loss(workers):
    def program():
        x = leaf()
        call("w1", torch.sum, x * x).backward()
        return x.grad

    assert_same(workers, program)


def test_gradients_add_up_over_backwards_and_contexts(workers):
    def once():
        call("w1", weighted, WORLD.weights["w0"] * 2).sum().backward()

    def program():
        once()
        once()
        return WORLD.weights["w0"].grad.clone()

    assert_same(workers, program)
    world = begin_anew()
    for _ in range(3):
        workers[0].run(over_workers, once)
    assert torch.equal(world.weights["w1"].grad, 3 * 2 * world.weights["w0"].detach())
    assert torch.equal(world.weights["w0"].grad, 3 * 2 * world.weights["w1"].detach())


# -- grad


def test_grad_gives_the_gradients_of_its_inputs_and_remote_leaves_keep_nothing(workers):
    def program():
        x, unused = leaf(1), leaf(2)
        y = call("w1", weighted_over, ["w2"], x)
        loss = (y * y * weight()).sum()
        slopes = torch.autograd.grad(loss, [x, y, unused], allow_unused=True)
        return slopes, x.grad

    _, gradients, _ = assert_same(workers, program)
    assert gradients == [None] * 3


def test_grad_runs_only_what_leads_to_its_inputs(workers):
    def program():
        x, y = leaf(1), leaf(2)
        a, b = call("w1", own_function, x), call("w2", own_function, y)
        return torch.autograd.grad((a * b).sum(), [x])

    _, _, counts = assert_same(workers, program)
    assert counts == {"user backward on w1": 1}


def test_grad_towards_a_received_value_stops_there(workers):
    def program():
        x = leaf()
        y = call("w1", own_function, x)
        z = call("w2", weighted, y)
        return torch.autograd.grad(z.sum(), [y])

    _, _, counts = assert_same(workers, program)
    assert counts == {}


def test_grad_of_something_unrelated_is_refused_as_locally(workers):
    def program():
        x, unused = leaf(1), leaf(2)
        y = call("w1", weighted, x)
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(y.sum(), [unused])

    assert_same(workers, program)


# -- retain_graph


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_retain_graph_lets_a_graph_be_used_again(workers, how):
    def program():
        x = leaf()
        loss = (call("w1", weighted_over, ["w2"], x) ** 2).sum()
        if how == "grad":
            first = torch.autograd.grad(loss, [x], retain_graph=True)
            return first, torch.autograd.grad(loss, [x])
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad

    assert_same(workers, program)


def test_without_retain_graph_a_second_backward_is_refused_by_the_worker_that_freed(workers):
    def program():
        x = leaf()
        loss = call("w1", cubed, x).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()

    assert_same(workers, program)


def test_a_graph_that_saved_nothing_can_be_used_again_without_retain_graph(workers):
    def program():
        x = leaf()
        loss = (call("w1", torch.add, x, 1) + x).sum()
        loss.backward()
        loss.backward()
        return x.grad

    assert_same(workers, program)


# -- create_graph


def test_create_graph_gives_second_and_third_order_across_workers(workers):
    def program():
        x = leaf()
        y = call("w2", cubed, call("w1", cubed, x))
        slopes = []
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
            slopes.append(y)
        return slopes

    _, gradients, _ = assert_same(workers, program)
    assert gradients == [None] * 3


def test_backward_of_a_slope_fills_grad_on_every_worker(workers):
    def program():
        x = leaf()
        loss = call("w2", cubed, call("w1", cubed, x)).sum()
        (slope,) = torch.autograd.grad(loss, [x], create_graph=True)
        (slope * slope).sum().backward()
        return x.grad, slope

    _, gradients, _ = assert_same(workers, program)
    assert [gradient is None for gradient in gradients] == [True, False, False]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_backward_with_create_graph_leaves_gradients_that_have_a_graph(workers):
    def program():
        x = leaf()
        call("w1", cubed, x).sum().backward(create_graph=True)
        slope = x.grad
        x.grad = None
        slope.sum().backward()
        seen = slope.clone(), x.grad.clone()
        for leaf_ in (x, *WORLD.weights.values()):  # torch says so: the cycle must be broken
            leaf_.grad = None if leaf_.grad is None else leaf_.grad.detach()
        return seen

    assert_same(workers, program)


def test_gradcheck_and_gradgradcheck_hold_for_a_remote_function(workers):
    def remote_sine(x, y):
        return call("w1", sine, x * y)

    def program():
        inputs = (torch.rand(3, dtype=torch.float64, requires_grad=True), leaf())
        return (
            torch.autograd.gradcheck(remote_sine, inputs),
            torch.autograd.gradgradcheck(remote_sine, inputs),
        )

    assert workers[0].run(over_workers, program) == (True, True)


# -- the calls of torch.distributed.autograd


def test_backward_into_the_map_leaves_grad_alone_on_every_worker(workers):
    def program():
        x = leaf()
        with gw.context() as context:
            assert isinstance(context, int)
            loss = (call("w1", weighted_over, ["w2"], x) ** 2).sum()
            gw.backward(context, [loss])
            maps = [member.run(gw.get_gradients, context) for member in workers]
        return x, maps

    world = begin_anew()
    x, maps = workers[0].run(program)
    assert x.grad is None
    assert world.gradients() == [None] * 3

    local = begin_anew()
    y = leaf()
    in_one_process(lambda: (call("w1", weighted_over, ["w2"], y) ** 2).sum().backward())
    assert [len(found) for found in maps] == [1, 1, 1]
    assert torch.equal(maps[0][x], y.grad)
    assert torch.equal(maps[1][world.weights["w1"]], local.weights["w1"].grad)
    assert torch.equal(maps[2][world.weights["w2"]], local.weights["w2"].grad)


def test_several_backwards_into_the_map_add_up(workers):
    def program():
        x = leaf()
        with gw.context() as context:
            first = call("w1", weighted, x).sum()
            second = call("w2", weighted_over, ["w1"], x).sum()
            gw.backward(context, [first], retain_graph=True)
            gw.backward(context, [first, second])
            found = gw.get_gradients(context)
            found_there = gw.rpc_sync("w1", mapped_gradient, args=(context,))
        return found[x], found_there

    begin_anew()
    got = workers[0].run(program)

    local = begin_anew()

    def in_one():
        x = leaf()
        first = call("w1", weighted, x).sum()
        second = call("w2", weighted_over, ["w1"], x).sum()
        first.backward(retain_graph=True)
        (first + second).backward()
        return x.grad

    assert torch.equal(got[0], in_one_process(in_one))
    assert torch.equal(got[1], local.weights["w1"].grad)


def mapped_gradient(context):
    return gw.get_gradients(context)[weight()]


def test_the_map_is_a_copy_of_live_gradients(workers):
    def program():
        x = leaf()
        with gw.context() as context:
            gw.backward(context, [call("w1", weighted, x).sum()])
            found = gw.get_gradients(context)
            found[x].zero_()
            found.clear()
            return gw.get_gradients(context)[x]

    assert workers[0].run(program).tolist() == [0, 0, 0]


def test_a_worker_that_has_no_gradients_of_a_context_has_an_empty_map(workers):
    def program():
        with gw.context() as context:
            return gw.rpc_sync("w2", count_gradients, args=(context,))

    assert workers[0].run(program) == 0


def count_gradients(context):
    return len(gw.get_gradients(context))


def test_hooks_run_once_when_gradients_go_into_the_map(workers):
    def program():
        with gw.context() as context:
            call("w1", watch_weight)
            gw.backward(context, [call("w1", hooked, leaf()).sum()])

    world = begin_anew()
    workers[0].run(program)
    counts = world.counts

    begin_anew()

    def in_one():
        call("w1", watch_weight)
        call("w1", hooked, leaf()).sum().backward()

    in_one_process(in_one)
    assert counts == WORLD.counts
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("asker", ["w0", "w1", "w2"])
def test_a_reference_is_differentiated_by_its_owner_and_by_its_users(workers, asker):
    def program():
        x = leaf()
        with gw.context() as context:
            loss = gw.remote("w1", squared_sum, args=(x,))
            if asker == "w0":
                loss.backward(context)
            else:
                gw.rpc_sync(asker, backward_from, args=(context, loss))
            return gw.get_gradients(context)[x], gw.rpc_sync("w1", mapped_gradient, args=(context,))

    def in_one():
        x = leaf()
        call("w1", squared_sum, x).backward()
        return x.grad, WORLD.weights["w1"].grad

    begin_anew()
    got = workers[0].run(program)
    begin_anew()
    for mine, theirs in zip(got, in_one_process(in_one), strict=True):
        assert torch.equal(mine, theirs)


def squared_sum(x):
    return ((x * weight()) ** 2).sum()


def backward_from(context, rref):
    rref.backward(context)


def test_a_reference_is_differentiated_twice_if_its_graph_is_retained(workers):
    def program():
        x = leaf()
        with gw.context() as context:
            loss = gw.remote("w1", squared_sum, args=(x,))
            loss.backward(context, retain_graph=True)
            loss.backward(context)
            return gw.get_gradients(context)[x], x

    begin_anew()
    gradient, x = workers[0].run(program)
    assert torch.equal(gradient, 2 * 2 * x.detach() * weight_of("w1") ** 2)


def weight_of(name):
    return WORLD.weights[name].detach()


def test_an_owner_differentiates_its_reference_into_grad_without_a_context_id(workers):
    def program():
        x = leaf()
        with gw.context():
            gw.RRef(call("w1", squared_sum, x)).backward()
        return x.grad, x

    begin_anew()
    gradient, x = workers[0].run(program)
    assert torch.equal(gradient, 2 * x.detach() * weight_of("w1") ** 2)


# -- as if local: what is called


def test_calls_nest_to_any_depth_and_visit_workers_again(workers):
    def program():
        x = leaf()
        y = call("w1", weighted_over, ["w2", "w1", "w0", "w0", "w1", "w2"], x)
        (y * x).sum().backward()
        return y, x.grad

    assert_same(workers, program)


@pytest.mark.parametrize("times", [0, 1, 2, 7])
def test_recursion_over_two_workers(workers, times):
    def program():
        x = leaf()
        ping_result = call("w1", ping, times, "w0", x)
        ping_result.sum().backward()
        return x.grad

    assert_same(workers, program)


@pytest.mark.slow
def test_a_chain_of_a_thousand_calls(workers):
    def program():
        x = leaf()
        y = x
        for n in range(1000):
            y = call(f"w{n % 3}", torch.neg, y)
        (call("w1", weighted, y) * x).sum().backward()
        return x.grad

    assert_same(workers, program)


@pytest.mark.slow
def test_two_hundred_calls_at_once(workers):
    def program():
        x = leaf()
        under_way = [begin(f"w{n % 3}", weighted, x * n) for n in range(200)]
        sum(wait().sum() for wait in under_way).backward()
        return x.grad

    assert_same(workers, program)


def test_a_callee_may_call_its_caller_back(workers):
    def program():
        x = leaf()
        call("w1", back_to, "w0", x * 3).sum().backward()
        return x.grad

    assert_same(workers, program)


def test_a_worker_may_call_itself(workers):
    def program():
        x = leaf()
        call("w0", weighted_over, ["w0", "w1", "w1"], x * weight()).sum().backward()
        return x.grad

    assert_same(workers, program)


def test_calls_fan_out_and_are_joined_in_any_order(workers):
    def program():
        x = leaf()
        under_way = [begin(f"w{n % 3}", weighted_over, ["w1", "w2"], x * n) for n in range(6)]
        results = [wait() for wait in reversed(under_way)]
        sum((result * n).sum() for n, result in enumerate(results)).backward()
        return x.grad

    assert_same(workers, program)


def test_a_reference_passed_to_a_third_worker_keeps_the_graph(workers):
    def there():
        x = leaf()
        rref = gw.remote("w1", weighted, args=(x,))
        gw.rpc_sync("w2", square_fetched, args=(rref,)).sum().backward()
        return x.grad

    def in_one():
        x = leaf()
        call("w2", weighted, call("w1", weighted, x)).sum().backward()
        return x.grad

    begin_anew()
    got = workers[0].run(over_workers, there)
    gradients = WORLD.gradients()
    begin_anew()
    assert torch.equal(got, in_one_process(in_one))
    assert torch.equal(gradients[1], WORLD.weights["w1"].grad)
    assert torch.equal(gradients[2], WORLD.weights["w2"].grad)


def test_state_that_a_function_keeps_is_used_by_a_later_call(workers):
    def program():
        x = leaf()
        call("w1", keep, x)
        y = call("w1", kept) + call("w2", weighted, call("w1", kept))
        y.sum().backward()
        return x.grad

    assert_same(workers, program)


def test_a_recurrent_state_that_stays_on_a_worker(workers):
    def program():
        x = leaf()
        call("w1", keep, x)
        for _ in range(6):
            call("w1", step)
        call("w1", kept).sum().backward()
        return x.grad

    assert_same(workers, program)


def step():
    WORLD.kept["w1"] = call("w2", weighted, WORLD.kept["w1"]) * weight()


# -- as if local: what is used


def test_results_that_are_not_used_play_no_part(workers):
    def program():
        x = leaf()
        call("w1", own_function, x)
        call("w2", watch_weight)
        call("w2", weighted, x)
        call("w1", weighted, x * 2).sum().backward()
        return x.grad

    _, gradients, counts = assert_same(workers, program)
    assert gradients[2] is None
    assert counts == {}


def test_one_of_several_results_is_used(workers):
    def program():
        x = leaf()
        _, thrice = call("w1", twice_and_thrice, x)
        thrice.sum().backward()
        return x.grad

    _, gradients, _ = assert_same(workers, program)
    assert gradients[1] is None


def test_a_graph_that_the_loss_does_not_reach_is_not_freed(workers):
    def program():
        x, y = leaf(1), leaf(2)
        first, second = call("w1", cubed, x).sum(), call("w1", cubed, y).sum()
        first.backward()
        seen = x.grad.clone(), y.grad
        second.backward()
        return seen, y.grad

    assert_same(workers, program)


def test_two_losses_one_after_the_other(workers):
    def program():
        x = leaf()
        shared = call("w1", weighted, x)
        first, second = call("w2", weighted, shared).sum(), (shared * shared).sum()
        first.backward(retain_graph=True)
        between = x.grad.clone()
        second.backward()
        return between, x.grad

    assert_same(workers, program)


def test_one_of_two_losses(workers):
    def program():
        x = leaf()
        shared = call("w1", weighted, x)
        call("w2", own_function, shared).sum()
        (shared * shared).sum().backward()
        return x.grad

    _, gradients, counts = assert_same(workers, program)
    assert gradients[2] is None
    assert counts == {}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_are_no_part_of_the_graph(workers, mode):
    def program():
        x = leaf()
        with mode():
            enabled, metric = call("w1", modes_and_product, x)
        assert not enabled
        assert not metric.requires_grad
        factor = metric.clone() if metric.is_inference() else metric
        (call("w2", weighted, x) * factor).sum().backward()
        return x.grad, metric.clone()

    _, gradients, _ = assert_same(workers, program)
    assert gradients[1] is None


def test_an_inference_tensor_made_elsewhere_is_one_here(workers):
    def program():
        with torch.inference_mode():
            return call("w1", weighted, vector(1)).is_inference()

    assert assert_same(workers, program)[0] == [True]


def test_a_remote_exception_that_is_caught_plays_no_part(workers):
    def program():
        x = leaf()
        y = x * weight()
        with pytest.raises(ValueError, match="on purpose"):
            call("w1", fails, y)
        call("w1", weighted, y).sum().backward()
        return x.grad

    _, gradients, _ = assert_same(workers, program)
    assert gradients[2] is None


# -- as if local: what travels


def test_a_parameter_gets_its_gradient_at_home(workers):
    def program():
        call("w1", product, weight(), torch.nn.Parameter(vector(4))).sum().backward()

    _, gradients, _ = assert_same(workers, program)
    assert gradients[0] is not None


def test_a_parameter_arrives_as_a_plain_tensor(workers):
    def program():
        return gw.rpc_sync("w1", kind_of, args=(weight(),))

    assert workers[0].run(over_workers, program) == ("Tensor", False)


def kind_of(x):
    return type(x).__name__, x.is_leaf


def test_lists_and_dicts_of_tensors_cross_whole(workers):
    def program():
        xs = [leaf(n) for n in range(4)]
        named = call("w1", of_all, {f"x{n}": x for n, x in enumerate(xs)})
        total = call("w2", summed, list(named.values()))
        (total + named["x2"]).sum().backward()
        return [x.grad for x in xs]

    assert_same(workers, program)


def test_the_same_tensor_twice_in_one_call(workers):
    def program():
        x = leaf()
        y = x * 2
        call("w1", product, y, y).sum().backward()
        return x.grad

    assert_same(workers, program)


def test_a_received_tensor_may_be_modified_in_place(workers):
    def program():
        x = leaf()
        y = x * 2
        call("w1", in_place, y).sum().backward()
        return x.grad, y

    assert_same(workers, program)


def test_a_returned_tensor_may_be_modified_in_place(workers):
    def program():
        x = leaf()
        y = call("w1", cubed, x)
        y.mul_(weight())
        y[0] = 7
        y.sum().backward()
        return x.grad, y

    assert_same(workers, program)


def test_a_sent_tensor_may_be_modified_in_place_afterwards(workers):
    def program():
        x = leaf()
        y = x * 2
        z = call("w1", cubed, y)
        y.mul_(5)
        (z + y).sum().backward()
        return x.grad, z

    assert_same(workers, program)


def test_a_value_that_was_saved_and_then_modified_is_refused_as_locally(workers):
    def program():
        x = leaf()
        y = call("w1", weighted, x)
        z = y * y
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()

    assert_same(workers, program)


# -- hooks and functions of the user's


def test_hooks_of_every_kind_run_once_and_see_the_total(workers):
    def program():
        x = leaf()
        for to in ("w0", "w1", "w2"):
            call(to, watch_weight)
        y = call("w1", hooked, x * weight())
        z = call("w2", hooked, y) + call("w1", weighted, y)
        z.sum().backward()
        return x.grad

    _, _, counts = assert_same(workers, program)
    assert len(counts) == 3 * 5 + 2 * 4
    assert set(counts.values()) == {1}


def test_hooks_run_once_per_backward(workers):
    def program():
        call("w1", watch_weight)
        loss = call("w1", hooked, leaf()).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert_same(workers, program)


def test_hooks_may_change_the_gradients_that_pass(workers):
    def program():
        x = leaf()
        y = call("w1", weighted, x)
        y.register_hook(lambda g: g * 10)
        x.register_hook(lambda g: g + 1)
        y.sum().backward()
        return x.grad

    assert_same(workers, program)


def test_a_gradient_can_be_retained_at_a_received_tensor(workers):
    def program():
        x = leaf()
        y = call("w1", weighted, x)
        y.retain_grad()
        (y * y).sum().backward()
        return y.grad, x.grad

    assert_same(workers, program)


def test_functions_written_by_the_user_run_their_backward_once(workers):
    def program():
        x = leaf()
        y = call("w1", own_function, own_function(x))
        (call("w2", own_function, y) + y).sum().backward()
        return x.grad

    _, _, counts = assert_same(workers, program)
    assert counts == {f"user backward on w{n}": 1 for n in range(3)}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("to", ["w0", "w1"])
def test_a_checkpoint_recomputes_calls_to_other_workers(workers, reentrant, to):
    def program():
        x = leaf()
        call(to, checkpointed, reentrant, x * 2).sum().backward()
        return x.grad

    _, _, counts = assert_same(workers, program)
    assert counts == {"forward": 1, f"recomputed on {to}": 2}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_call_to_a_checkpoint_is_exact(workers, reentrant):
    """How much is computed again is not compared: one without reentrance covers its own worker."""

    def program():
        x = leaf()
        outer = checkpoint(
            lambda x: call("w1", checkpointed, reentrant, x) * 2,
            x * 1,
            use_reentrant=reentrant,
            preserve_rng_state=False,
        )
        outer.sum().backward()
        WORLD.counts.clear()
        return x.grad

    assert_same(workers, program)


def exponential(x):
    return x.exp()


def test_what_a_callee_saved_in_a_checkpoint_is_not_to_be_changed_in_place(workers):
    """One process does not look at versions in such a checkpoint, and gives a wrong gradient."""

    def recomputed(x):
        y = gw.remote("w0", exponential, args=(x,)).to_here()  # the value itself, not a copy
        return y.mul_(3).square()

    def alone(x):
        return x.exp().mul_(3).square()

    x = leaf()
    checkpoint(alone, x, use_reentrant=False).sum().backward()
    assert torch.allclose(x.grad, 3 * 18 * (2 * x).exp())

    def program():
        with gw.context():
            x = leaf()
            y = checkpoint(recomputed, x, use_reentrant=False)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
            assert x.grad is None

    workers[0].run(program)


# -- several passes at once


def in_threads(*programs):
    """Run each in a thread of its own, inside the context of the caller; their results in order."""
    with ThreadPoolExecutor(len(programs)) as threads:
        started = [threads.submit(copy_context().run, program) for program in programs]
        return [thread.result() for thread in started]


def test_two_threads_differentiate_in_one_context(workers):
    def one(start):
        def program():
            x = leaf(start)
            loss = (call("w1", weighted_over, ["w2", "w1"], x) ** 2).sum()
            loss.backward()
            return x.grad

        return program

    def program():
        if _one_process.get() is not None:
            return [one(n)() for n in range(4)]
        return in_threads(*(one(n) for n in range(4)))

    assert_same(workers, program)


def test_two_threads_differentiate_one_graph(workers):
    def program():
        x = leaf()
        y = call("w1", weighted_over, ["w2"], x)
        losses = [(y * n).sum() for n in range(1, 5)]
        passes = [lambda loss=loss: loss.backward(retain_graph=True) for loss in losses]
        if _one_process.get() is not None:
            for each in passes:
                each()
        else:
            in_threads(*passes)
        return x.grad

    assert_same(workers, program)


def test_backwards_into_the_map_run_at_once_in_one_context(workers):
    def program():
        x = leaf()
        with gw.context() as context:
            y = call("w1", weighted, x)
            losses = [(y * n).sum() for n in range(1, 5)]
            in_threads(
                *(
                    lambda loss=loss: gw.backward(context, [loss], retain_graph=True)
                    for loss in losses
                )
            )
            return gw.get_gradients(context)[x]

    begin_anew()
    assert torch.equal(workers[0].run(program), 10 * weight_of("w1"))


def test_contexts_of_several_workers_are_differentiated_at_once(workers):
    def one(member, n):
        def program():
            x = leaf(n)
            path = [f"w{(n + k) % 3}" for k in range(4)]
            (weighted_over(path, x) ** 2).sum().backward()
            return x.grad

        return member.run(over_workers, program)

    world = begin_anew()
    with ThreadPoolExecutor(6) as threads:
        got = list(threads.map(one, [workers[n % 3] for n in range(6)], range(6)))
    gradients = world.gradients()

    begin_anew()
    for n in range(6):
        token = _one_process.set(f"w{n % 3}")
        x = leaf(n)
        (weighted_over([f"w{(n + k) % 3}" for k in range(4)], x) ** 2).sum().backward()
        _one_process.reset(token)
        assert torch.equal(got[n], x.grad)
    for mine, theirs in zip(gradients, WORLD.gradients(), strict=True):
        assert torch.equal(mine, theirs)


def test_backward_may_run_in_another_thread_than_the_forward(workers):
    def program():
        x = leaf()
        loss = (call("w1", weighted_over, ["w2"], x) ** 2).sum()
        in_threads(loss.backward)
        return x.grad

    assert_same(workers, program)


@pytest.mark.parametrize("worker_known", [False, True])
def test_backward_may_run_in_a_thread_that_knows_of_no_context(workers, worker_known):
    """The nodes know where they belong; a thread need not."""

    def program():
        x = leaf()
        loss = (call("w1", weighted_over, ["w2"], x) ** 2).sum()
        scope = workers[0].worker.scope() if worker_known else contextlib.nullcontext()

        def in_scope():
            with scope:
                loss.backward()

        with ThreadPoolExecutor(1) as threads:
            threads.submit(in_scope).result()
        return x.grad

    assert_same(workers, program)


def test_calls_of_several_threads_join_in_one_loss(workers):
    def program():
        x = leaf()

        def branch(n):
            return lambda: call(f"w{n % 3}", weighted_over, ["w1"], x * n)

        if _one_process.get() is not None:
            parts = [branch(n)() for n in range(1, 5)]
        else:
            parts = in_threads(*(branch(n) for n in range(1, 5)))
        sum(part.sum() for part in parts).backward()
        return x.grad

    assert_same(workers, program)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, at its first use
def test_a_forward_mode_tangent_is_refused_rather_than_lost():
    def program():
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
            with pytest.raises(gw.NotSerializable, match="a tensor with a forward-mode tangent"):
                gw.rpc_sync("w1", torch.sin, args=(dual,))
            plain = gw.rpc_sync("w1", torch.sin, args=(torch.ones(2),))
        assert torch.equal(plain, torch.ones(2).sin())

    with cluster(2) as workers:
        workers[0].run(program)
