"""A checkpoint around calls whose callees draw random numbers; each worker has its own generator.

The truth is the same function without a checkpoint: it draws once.
"""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

import gradwire
from gradwire.errors import UsageError
from gradwire.rpc.messages import Result, ValueReady
from gradwire.testing import cluster, generators
from tests.leftovers import eventually

SEED = 11
KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def noisy(x):
    return F.dropout(x.sin(), 0.5)


def quiet(x):
    return x.sin()


def quiet_there(x, to):
    return quiet(gradwire.rpc_sync(to, quiet, args=(x,)))


def noisy_there(x, to):
    """Draws here, there, and here again."""
    return noisy(gradwire.rpc_sync(to, noisy, args=(noisy(x),)))


def noisy_twice(x, to):
    first = gradwire.rpc_async(to, noisy, args=(x,))
    second = gradwire.rpc_async(to, noisy, args=(x.cos(),))
    return noisy(first.wait() * second.wait())


def checkpointed(x, to, reentrant):
    return checkpoint(noisy_there, x, to, use_reentrant=reentrant)


def checkpointed_twice(x, to, outer, inner):
    def run(x):
        return checkpointed(noisy(x), to, inner).cos()

    return checkpoint(run, x, use_reentrant=outer)


@gradwire.async_execution
def noisy_later(x, to):
    future = gradwire.rpc_async(to, noisy, args=(noisy(x),))
    return future.then(lambda done: done.wait() * 2)


@gradwire.async_execution
def noisy_later_raises(x, to):
    future = gradwire.rpc_async(to, noisy, args=(noisy(x),))
    return future.then(lambda done: raises(done.wait().detach()))


def raises(x):
    raise ValueError(x.sum().item())


def raises_what_it_drew(x, to):
    raises(noisy_there(x.detach(), to))


def noisy_itself(x, name):
    """Draws in a value that it keeps, and fetches as its owner."""
    return noisy(gradwire.remote(name, noisy, args=(noisy(x),)).to_here())


def noisy_by_a_third(x, to):
    """Fetched by a worker that has not made the call."""
    return gradwire.rpc_sync("w0", fetched, args=(gradwire.remote(to, noisy, args=(x,)),))


def fetched(reference):
    return noisy(reference.to_here())


def noisy_and_forgotten(x, to):
    """Nobody waits for a call that draws."""
    gradwire.rpc_async(to, noisy, args=(x.detach(),))
    return noisy(x)


def noisy_then_there(x, to):
    return noisy_there(noisy(x), to)


def more_with_a_graph(x, to):
    return noisy_there(x, to) if torch.is_grad_enabled() else x.sin()


to_be_completed = [torch.futures.Future()]
has_begun = threading.Event()


@gradwire.async_execution
def completed_by_another():
    has_begun.set()
    return to_be_completed[0]


def completes(x):
    y = noisy(x)
    to_be_completed[0].set_result(y.detach())
    return y


drew = []


def draws_at_first(x):
    """Like a module that is made when it is first used."""
    if not drew:
        drew.append(torch.rand(3))
    return x.sin() * drew[0].sum()


def draws_more_each_time(x):
    drew.append(1)
    for _ in drew:
        x = noisy(x)
    return x


class Holder:
    def noisy(self, x):
        return noisy(x)


FUNCTIONS = [noisy, quiet, noisy_there, noisy_twice, checkpointed, noisy_later, completes]
FUNCTIONS += [completed_by_another, draws_at_first, draws_more_each_time, Holder, nn.Dropout]
FUNCTIONS += [noisy_later_raises, raises_what_it_drew, noisy_itself, noisy_by_a_third, fetched]
FUNCTIONS += [
    quiet_there,
    noisy_and_forgotten,
    checkpointed_twice,
    noisy_then_there,
    more_with_a_graph,
]


@pytest.fixture(autouse=True)
def nothing_drawn():
    drew.clear()


def by_sync(x):
    return gradwire.rpc_sync("w1", noisy, args=(x,))


def by_async(x):
    return gradwire.rpc_async("w1", noisy, args=(x,)).wait()


def by_remote(x):
    return gradwire.remote("w1", noisy, args=(x,)).to_here()


def by_proxy(x):
    return gradwire.remote("w1", Holder).rpc_sync().noisy(x)


def by_module(x):
    return gradwire.RemoteModule("w1", nn.Dropout, (0.5,))(x)


def nested(x):
    return gradwire.rpc_sync("w1", noisy_there, args=(x, "w2"))


def back_here(x):
    return gradwire.rpc_sync("w1", noisy_there, args=(x, "w0"))


def back_and_forth(x):
    return gradwire.rpc_sync("w1", noisy_there, args=(x, "w1"))


def to_itself(x):
    return gradwire.rpc_sync("w0", noisy, args=(x,))


def many(x):
    for _ in range(3):
        x = noisy(by_sync(noisy(x)))
    return x


def two_at_once(x):
    return gradwire.rpc_sync("w1", noisy_twice, args=(x, "w2"))


def later(x):
    return gradwire.rpc_sync("w1", noisy_later, args=(x, "w2"))


def to_a_checkpoint(x):
    return gradwire.rpc_sync("w1", checkpointed, args=(x, "w2", False))


def to_a_reentrant_checkpoint(x):
    return gradwire.rpc_sync("w1", checkpointed, args=(x, "w2", True))


def around_a_checkpoint(x):
    return noisy(checkpoint(many, x, use_reentrant=False)) * by_sync(x)


def around_a_reentrant_checkpoint(x):
    return noisy(checkpoint(many, x, use_reentrant=True)) * by_sync(x)


def after_a_caught_error(x):
    try:
        gradwire.rpc_sync("w1", noisy, args=(1,))
    except AttributeError:
        x = x * 2
    return by_sync(x)


def scaled_by(call, x):
    try:
        call()
    except ValueError as error:
        return by_sync(x * error.args[0])


def after_an_error_that_tells_what_was_drawn(x):
    return scaled_by(lambda: gradwire.rpc_sync("w1", raises_what_it_drew, (x, "w2")), x)


def after_an_error_of_a_reference(x):
    return scaled_by(lambda: gradwire.remote("w1", raises_what_it_drew, (x, "w2")).to_here(), x)


def after_an_error_that_comes_later(x):
    return scaled_by(lambda: gradwire.rpc_sync("w1", noisy_later_raises, (x, "w2")), x)


def after_an_error_on_the_way(x):
    return scaled_by(lambda: gradwire.rpc_sync("w1", noisy_later_raises, (x, "w0")), x)


def kept_here(x):
    return noisy_itself(x, "w0")


def kept_elsewhere_and_back_here(x):
    return noisy(gradwire.remote("w1", noisy_there, args=(noisy(x), "w0")).to_here())


def kept_there(x):
    return gradwire.rpc_sync("w1", noisy_itself, args=(x, "w1"))


def fetched_by_a_third(x):
    return gradwire.rpc_sync("w1", noisy_by_a_third, args=(x, "w2"))


def forgotten_there(x):
    return gradwire.rpc_sync("w1", noisy_and_forgotten, args=(x, "w2"))


def a_method_of_one_to_be_made(x):
    return gradwire.remote("w0", Holder).rpc_sync().noisy(noisy(x))


def with_a_callback_that_calls(x):
    future = gradwire.rpc_async("w1", noisy, args=(x,))
    called = future.then(lambda done: gradwire.rpc_sync("w2", quiet, args=(done.wait(),)))
    return called.wait()


def after_one_that_nobody_waits_for(x):
    gradwire.rpc_async("w2", noisy, args=(x.detach(),))
    return by_sync(x)


PROGRAMS = [by_sync, by_async, by_remote, by_proxy, by_module, nested, back_here, back_and_forth]
PROGRAMS += [to_itself, many, two_at_once, later, to_a_checkpoint, to_a_reentrant_checkpoint]
PROGRAMS += [around_a_checkpoint, around_a_reentrant_checkpoint, after_a_caught_error]
PROGRAMS += [after_one_that_nobody_waits_for, with_a_callback_that_calls]
PROGRAMS += [after_an_error_that_tells_what_was_drawn, after_an_error_of_a_reference]
PROGRAMS += [after_an_error_that_comes_later, after_an_error_on_the_way, kept_here, kept_there]
PROGRAMS += [kept_elsewhere_and_back_here]
PROGRAMS += [fetched_by_a_third, forgotten_there, a_method_of_one_to_be_made]


def recomputed(program, x, reentrant, **options):
    """What follows the calls keeps their results, so that these are needed again."""
    return checkpoint(lambda x: program(x).cos().exp(), x, use_reentrant=reentrant, **options)


def plain(program):
    return gradient(lambda x: program(x).cos().exp())


def gradient(run, *, own=True, passes=1, prepare=lambda workers: None):
    """Of a program on w0; and the numbers that each worker would draw next."""
    given = generators(3, seed=SEED)
    torch.manual_seed(SEED)
    with cluster(3, expose=FUNCTIONS, generators=given if own else None) as workers:
        prepare(workers)

        def on_w0():
            x = torch.linspace(0.1, 3.0, 30, requires_grad=True)
            with gradwire.context():
                y = run(x * 1)
                loss = (y * y).exp().sum()
                for n in range(passes):
                    loss.backward(retain_graph=n + 1 < passes)
            return x.grad

        found = workers[0].run(on_w0)
        # Of calls that nobody waits for, too: they draw.
        assert eventually(lambda: not any(w.worker.agent.in_flight for w in workers))
    return found, [torch.rand(4, generator=g) for g in given], torch.rand(4)


def same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert torch.equal(found[2], expected[2])


@KINDS
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_checkpoint_around_calls_that_draw_is_exact(program, reentrant):
    found = gradient(lambda x: recomputed(program, x, reentrant))

    same(found, plain(program))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("where", ["w0", "w1"])
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("outer", [True, False], ids=["in reentrant", "in not reentrant"])
def test_a_checkpoint_inside_another_is_exact(outer, inner, where):
    def run(x):
        return gradwire.rpc_sync(where, checkpointed_twice, args=(x, "w2", outer, inner))

    def plainly(x):
        return gradwire.rpc_sync(where, noisy_then_there, args=(x, "w2")).cos()

    same(gradient(run), gradient(plainly))
    same(gradient(lambda x: recomputed(run, x, outer)), plain(plainly))


@KINDS
@pytest.mark.parametrize("program", [by_sync, nested, back_here, many], ids=lambda p: p.__name__)
def test_it_is_exact_where_workers_share_a_generator(program, reentrant):
    found = gradient(lambda x: recomputed(program, x, reentrant), own=False)

    same(found, gradient(lambda x: program(x).cos().exp(), own=False))


def test_it_is_repeated_as_often_as_one_likes():
    found = gradient(lambda x: checkpoint(many, x, use_reentrant=False), passes=3)

    same(found, gradient(many, passes=3))


def test_it_is_exact_without_an_early_stop():
    def run(x):
        with set_checkpoint_early_stop(False):
            return checkpoint(many, x, use_reentrant=False)

    same(gradient(run), gradient(many))


@KINDS
def test_a_sequence_of_checkpoints_is_exact(reentrant):
    parts = [by_sync, noisy, nested, noisy]

    def plain(x):
        for part in parts:
            x = part(x)
        return x

    found = gradient(lambda x: checkpoint_sequential(parts, 2, x, use_reentrant=reentrant))

    same(found, gradient(plain))


@KINDS
def test_nothing_is_put_back_if_that_is_not_wanted(reentrant):
    def run(x):
        return recomputed(by_sync, x, reentrant, preserve_rng_state=False)

    found, next_drawn, _ = gradient(run)
    expected, next_expected, _ = plain(by_sync)

    assert not torch.equal(found, expected)
    assert not torch.equal(next_drawn[1], next_expected[1])


def calls_sent(run):
    with cluster(2, expose=FUNCTIONS, generators=generators(2, seed=SEED)) as workers:
        sizes = []

        def on_w0():
            x = torch.linspace(0.1, 3.0, 30, requires_grad=True)
            with gradwire.context():
                run(x * 1).sum().backward()
            return sizes

        before = workers[1].worker.agent.answer

        def noted(source, message, *args, **kwargs):
            sizes.append(len(getattr(message, "draws", b"")))
            return before(source, message, *args, **kwargs)

        workers[1].worker.agent.answer = noted
        return workers[0].run(on_w0)


def test_a_value_that_is_there_before_what_it_drew_is_told():
    """Its owner fetches it and returns before the answer of the call that made it has come."""
    result_left = threading.Event()

    def hold_back(workers):
        answer = workers[1].worker.agent.answer

        def answered(source, message, *args, **kwargs):
            if isinstance(message, ValueReady):
                result_left.wait(0.3)  # it is late, or at last is waited for
            if isinstance(message, Result):
                result_left.set()
            return answer(source, message, *args, **kwargs)

        workers[1].worker.agent.answer = answered

    found = gradient(lambda x: recomputed(kept_there, x, False), prepare=hold_back)

    same(found, plain(kept_there))


def test_a_state_travels_only_where_one_is_needed():
    def quietly(x):
        return gradwire.rpc_sync("w1", quiet, args=(x,))

    assert calls_sent(by_sync) == [0]
    assert calls_sent(lambda x: recomputed(quietly, x, False)) == [0, 0]
    noted, again = calls_sent(lambda x: recomputed(by_sync, x, False))
    assert 5056 < noted < 5300
    assert again == 0


@KINDS
def test_a_function_that_draws_only_at_first_may_be_called(reentrant):
    def run(x):
        return gradwire.rpc_sync("w1", draws_at_first, args=(x,))

    found = gradient(lambda x: recomputed(run, x, reentrant))
    drew.clear()

    same(found, plain(run))


@KINDS
def test_a_function_that_draws_differently_is_refused(reentrant):
    def run(x):
        return gradwire.rpc_sync("w1", draws_more_each_time, args=(x,))

    with pytest.raises(UsageError, match=r"draws_more_each_time on w1 draws .* but not those of"):
        gradient(lambda x: recomputed(run, x, reentrant))


@KINDS
def test_a_call_from_another_thread_is_refused_if_it_draws(reentrant):
    def from_a_thread(function, x):
        with ThreadPoolExecutor(1) as pool:
            run = contextvars.copy_context().run
            return pool.submit(run, gradwire.rpc_sync, "w1", function, (x,)).result()

    def quietly(x):
        return from_a_thread(quiet, x)

    same(gradient(lambda x: recomputed(quietly, x, reentrant)), plain(quietly))
    with pytest.raises(UsageError, match=r"noisy on w1 draws .* from another thread"):
        gradient(lambda x: recomputed(partial(from_a_thread, noisy), x, reentrant))


def test_more_calls_than_the_forward_made_are_refused_if_they_draw():
    """The forward of a reentrant checkpoint runs without a graph, and a function can tell."""

    def here(x):
        return more_with_a_graph(x, "w2")

    def there(x):
        return gradwire.rpc_sync("w1", more_with_a_graph, args=(x, "w2"))

    for run in (here, there):
        with pytest.raises(UsageError, match=r"noisy on w2 draws .* forward did not call it here"):
            gradient(lambda x, run=run: recomputed(run, x, True))


def test_a_callback_whose_call_draws_is_refused():
    def run(x):
        future = gradwire.rpc_async("w1", quiet, args=(x,))
        return future.then(lambda done: gradwire.rpc_sync("w2", noisy, args=(done.wait(),))).wait()

    with pytest.raises(UsageError, match=r"noisy on w2 draws .* are not known"):
        gradient(lambda x: recomputed(run, x, False))


def test_a_future_that_draws_is_refused():
    def run(x):
        later = gradwire.rpc_async("w1", completed_by_another)
        assert has_begun.wait(30)
        return gradwire.rpc_sync("w1", completes, args=(x,)) * later.wait()

    with pytest.raises(UsageError, match=r"drawn on w1 between .*completed_by_another and"):
        gradient(lambda x: checkpoint(run, x, use_reentrant=False))


def test_other_calls_in_the_recomputation_are_refused():
    functions = ["w1", "w2"]

    def run(x):
        return gradwire.rpc_sync(functions.pop(0), noisy, args=(x,))

    with pytest.raises(UsageError, match=r"calls .*noisy on w2 where its forward called .* on w1"):
        gradient(lambda x: checkpoint(run, x, use_reentrant=True))
