"""What goes wrong elsewhere arrives here, with its type and its worker, and leaves nothing."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context

import pytest
import torch

import gradwire as gw
from gradwire.errors import (
    BackwardTimeout,
    CallTimeout,
    ContextClosed,
    NotExposed,
    NotSerializable,
    PeerLost,
    RemoteError,
    UnknownWorker,
    UsageError,
)
from gradwire.options import Options, Timeouts
from gradwire.testing import cluster
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually, leftovers

HERE = sys.modules[__name__]
WEIGHTS: dict[str, torch.Tensor] = {}


@pytest.fixture
def workers():
    """Their own for each test, so that what one leaves behind is not taken for another's."""
    WEIGHTS.update({f"w{n}": torch.tensor(n + 2.0, requires_grad=True) for n in range(3)})
    with cluster(3, expose=[HERE]) as made:
        yield made
        WEIGHTS.clear()
        assert_nothing_left(made)


# -- what runs on the workers


class OwnError(Exception):
    """Exposed."""


class WantsThree(ValueError):
    """Exposed, with a constructor that an error could not be rebuilt with."""

    def __init__(self, a, b, c):
        super().__init__(f"{a} {b} {c}")


class _Hidden(ValueError):
    """Not exposed."""


RAISED = {
    "ValueError": lambda: ValueError("bad value"),
    "TypeError": lambda: TypeError("bad type"),
    "KeyError": lambda: KeyError("no such key"),
    "IndexError": lambda: IndexError("no such index"),
    "AttributeError": lambda: AttributeError("no such attribute"),
    "AssertionError": lambda: AssertionError("not so"),
    "NotImplementedError": lambda: NotImplementedError("not yet"),
    "ZeroDivisionError": lambda: ZeroDivisionError("nothing to divide by"),
    "StopIteration": lambda: StopIteration("no more"),
    "OSError": lambda: OSError("no system"),
    "FileNotFoundError": lambda: FileNotFoundError("no file"),
    "TimeoutError": lambda: TimeoutError("no time"),
    "MemoryError": lambda: MemoryError("no room"),
    "UnicodeError": lambda: UnicodeError("no letter"),
    "RuntimeError": lambda: RuntimeError("no run"),
    "OwnError": lambda: OwnError("our own"),
    "WantsThree": lambda: WantsThree(1, 2, 3),
    "_Hidden": lambda: _Hidden("unknown there"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(),
}
KEPT = [name for name in RAISED if name not in ("_Hidden", "SystemExit", "KeyboardInterrupt")]


def fail(kind):
    raise RAISED[kind]()


def fail_over(path, kind):
    if path:
        gw.rpc_sync(path[0], fail_over, args=(path[1:], kind))
    fail(kind)


def fail_from_cause():
    try:
        fail("KeyError")
    except KeyError as error:
        raise OwnError("outer") from error


def rescued(to, kind):
    try:
        gw.rpc_sync(to, fail, args=(kind,))
    except Exception as error:
        return type(error).__name__, error.worker
    return "nothing raised"


def name():
    return gw.get_worker_info().name


def weighted(x):
    return x * WEIGHTS[name()]


def weighted_over(path, x):
    x = weighted(x)
    return gw.rpc_sync(path[0], weighted_over, args=(path[1:], x)) if path else x


def cubed(x):
    return x**3


def nap(gate, x=None):
    GATES[gate].wait(30)
    return x


def make_lock(x=None):
    return threading.Lock()


def _not_exposed(x=None):
    return x


def give():
    return WEIGHTS[name()] * 2


def call_and_give(to):
    return gw.rpc_sync(to, give)


class Fragile(torch.autograd.Function):
    """Its backward raises on the worker named."""

    @staticmethod
    def forward(ctx, where, x):
        ctx.where = where
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        if ctx.where in BROKEN:
            raise OwnError(f"broken on {ctx.where}")
        return None, gradient


BROKEN: set[str] = set()


@pytest.fixture
def _mended():
    yield
    BROKEN.clear()


def fragile_over(path, x):
    """Like `weighted_over`, with a user-written function on the way that may raise."""
    x = Fragile.apply(name(), weighted(x))
    return gw.rpc_sync(path[0], fragile_over, args=(path[1:], x)) if path else x


def line_of(text):
    """The number of the one line of this file that ends with a comment of this text."""
    with open(__file__, encoding="utf-8") as lines:
        (found,) = [n for n, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {text}")]
    return found


# -- exceptions of the user's functions


@pytest.mark.parametrize("kind", KEPT)
def test_an_exception_arrives_as_its_own_type_with_its_worker(workers, kind):
    original = RAISED[kind]()

    with pytest.raises(type(original)) as raised:
        workers[0].run(gw.rpc_sync, "w1", fail, args=(kind,))

    error = raised.value
    assert isinstance(error, RemoteError)
    assert isinstance(error, RuntimeError)  # as in torch's rpc
    assert error.worker == "w1"
    assert error.type_name.rpartition(":")[2] == kind
    assert str(error).startswith(f"{kind} on w1: {error.args[0]}\n")


@pytest.mark.parametrize("kind", ["_Hidden", "SystemExit", "KeyboardInterrupt"])
def test_an_exception_of_an_unknown_type_or_one_that_would_end_us_arrives_as_a_remote_error(
    workers, kind
):
    with pytest.raises(RemoteError) as raised:
        workers[0].run(gw.rpc_sync, "w1", fail, args=(kind,))

    assert type(raised.value) is RemoteError
    assert str(raised.value).startswith(f"{kind} on w1: ")
    assert workers[0].run(gw.rpc_sync, "w1", name) == "w1"


@pytest.mark.parametrize("kind", KEPT)
def test_every_way_of_calling_keeps_the_type(workers, kind):
    expected = type(RAISED[kind]())

    def program():
        with pytest.raises(expected):
            gw.rpc_async("w1", fail, args=(kind,)).wait()
        with pytest.raises(expected):
            gw.remote("w1", fail, args=(kind,)).to_here()
        with pytest.raises(expected):
            gw.rpc_sync("w0", fail, args=(kind,))

    workers[0].run(program)


def test_the_remote_traceback_shows_the_line_that_raised(workers):
    with pytest.raises(ValueError, match="bad value") as raised:
        workers[0].run(gw.rpc_sync, "w1", fail, args=("ValueError",))

    assert "--- traceback on w1 ---" in str(raised.value)
    assert "raise RAISED[kind]()" in raised.value.remote_traceback
    assert __file__ in raised.value.remote_traceback


def test_an_exception_from_further_away_names_where_it_was_raised_and_whom_it_passed(workers):
    with pytest.raises(OwnError, match="our own") as raised:
        workers[0].run(gw.rpc_sync, "w1", fail_over, args=(["w2"], "OwnError"))

    assert raised.value.worker == "w2"
    assert "--- traceback on w2 ---" in str(raised.value)
    assert raised.value.remote_traceback.count("in fail_over") >= 2  # on w2, and on w1


def test_the_cause_of_an_exception_is_in_its_traceback(workers):
    with pytest.raises(OwnError, match="outer") as raised:
        workers[0].run(gw.rpc_sync, "w1", fail_from_cause)

    assert "KeyError: 'no such key'" in raised.value.remote_traceback
    assert "direct cause of the following exception" in raised.value.remote_traceback


def test_a_callee_may_catch_what_its_own_calls_raised(workers):
    assert workers[0].run(gw.rpc_sync, "w1", rescued, args=("w2", "OwnError")) == (
        "RemoteOwnError",
        "w2",
    )


def test_an_exception_is_not_printed_where_it_was_raised(workers, capfd):
    with pytest.raises(ValueError, match="bad value"):
        workers[0].run(gw.rpc_sync, "w1", fail, args=("ValueError",))

    assert capfd.readouterr() == ("", "")


def test_an_error_of_an_operator_keeps_the_text_of_torch(workers):
    with pytest.raises(RuntimeError, match=r"The size of tensor a \(2\) must match"):
        workers[0].run(gw.rpc_sync, "w1", torch.add, args=(torch.ones(2), torch.ones(3)))


def test_missing_arguments_are_a_type_error_as_locally(workers):
    with pytest.raises(TypeError, match=r"fail\(\) missing 1 required positional argument"):
        workers[0].run(gw.rpc_sync, "w1", fail)


def test_a_timeout_further_away_arrives_as_a_call_timeout(workers, gate):
    with pytest.raises(CallTimeout, match="w2 did not answer") as raised:
        workers[0].run(gw.rpc_sync, "w1", nap_over, args=("w2", gate))
    GATES[gate].set()

    assert raised.value.worker == "w1"
    assert isinstance(raised.value, TimeoutError)
    assert "hint: a longer timeout=" in str(raised.value)


def nap_over(to, gate):
    return gw.rpc_sync(to, nap, args=(gate,), timeout=0.02)


# -- a graph that is not cut, with a context or without


def warned(program, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program(*args)
    return caught


@pytest.mark.parametrize("scope", [gw.context, nullcontext], ids=["a context", "no context"])
def test_every_way_of_calling_keeps_the_graph_and_nothing_warns(workers, scope):
    def program():
        x = torch.tensor(1.0, requires_grad=True)
        with scope():
            terms = [
                gw.rpc_sync("w1", weighted, args=(x,)),
                gw.rpc_async("w1", weighted, args=(x,)).wait(),
                gw.remote("w1", weighted, args=(x,)).to_here(),
                gw.RRef(torch.tensor(5.0)).rpc_sync().mul(x),
                gw.rpc_sync("w1", weigh_all, args=([x, x * 2, x.detach()],)),
                gw.rpc_sync("w1", call_and_give, args=("w2",)),
            ]
            sum(terms).backward()
        assert x.grad == 3 + 3 + 3 + 5 + 3 * 3
        assert WEIGHTS["w2"].grad == 2

    assert warned(workers[0].run, program) == []


def weigh_all(values):
    return sum(map(weighted, values))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_recorded(workers, mode):
    def program():
        x = torch.ones(2, requires_grad=True)
        with mode():
            kept = [
                gw.rpc_sync("w1", cubed, args=(x,)),
                gw.rpc_async("w1", give).wait(),
                gw.remote("w1", give).to_here(),
            ]
        assert not any(value.requires_grad for value in kept)
        assert [member.worker.engine.edges.recvs() for member in workers] == [[], [], []]

    assert warned(workers[0].run, program) == []


def test_a_tensor_that_was_detached_has_no_edge(workers):
    def program():
        y = gw.rpc_sync("w1", torch.sin, args=(torch.ones(2, requires_grad=True).detach(),))
        assert not y.requires_grad
        assert gw.live_edges() == []

    workers[0].run(program)


def test_every_edge_says_at_which_line_of_the_program_it_was_sent(workers):
    def program():
        x = torch.ones(2, requires_grad=True)
        kept = [gw.rpc_sync("w1", cubed, args=(x,))]  # sent sync
        future = gw.rpc_async("w1", cubed, args=(x,))  # sent async
        kept.append(future.wait())
        kept.append(gw.remote("w1", cubed, args=(x,)))  # sent remote
        other = gw.remote("w1", torch.ones, args=(2,))
        kept.append(other.rpc_sync().mul(x))  # sent by a method
        assert eventually(lambda: len(gw.live_edges()) == 4)
        return kept, gw.live_edges(), workers[1].run(gw.live_edges)

    kept, here, there = workers[0].run(program)
    texts = ("sent sync", "sent async", "sent remote", "sent by a method")
    assert [edge.line for edge in here] == [f"{__file__}:{line_of(text)}" for text in texts]
    assert {(edge.to, edge.bytes) for edge in here} == {("w1", 8)}
    assert {(edge.to, edge.line) for edge in there} == {("w0", "a result")}
    assert all(edge.age >= 0 for edge in here + there)
    del kept


def test_a_call_that_a_served_function_made_is_shown_at_its_line(workers):
    kept = workers[0].run(gw.rpc_sync, "w1", call_weighted_over, ("w2", WEIGHTS["w0"]))

    line = call_weighted_over.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in [edge.line for edge in workers[1].run(gw.live_edges)]
    del kept


def call_weighted_over(to, x):
    return gw.rpc_sync(to, weighted, args=(x,))


def test_a_thread_that_does_not_carry_the_context_records_as_well(workers):
    def program():
        x = torch.ones(2, requires_grad=True)
        with gw.context(), ThreadPoolExecutor(1) as threads:
            outside = threads.submit(workers[0].run, call_weighted, x).result()
            inside = threads.submit(copy_context().run, call_weighted, x).result()
            (inside + 2 * outside).sum().backward(retain_graph=True)
        assert x.grad.tolist() == [9, 9]
        outside.sum().backward()  # not of the context, so not of its end either
        assert x.grad.tolist() == [12, 12]
        with pytest.raises(ContextClosed, match="is closed on w0"):
            inside.sum().backward()

    workers[0].run(program)


def call_weighted(x):
    return gw.rpc_sync("w1", weighted, args=(x,))


def test_a_result_that_comes_after_its_context_was_closed_leads_nowhere_and_says_so(workers, gate):
    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context() as context:
            future = gw.rpc_async("w1", nap_weighted, args=(gate, x))
            assert eventually(lambda: len(workers[1].worker.engine.edges.received) == 1)
            workers[0].worker.engine.close(context)
            GATES[gate].set()
            late = future.wait()
        with pytest.raises((ContextClosed, PeerLost), match="closed"):
            late.backward()
        assert x.grad is None
        assert WEIGHTS["w1"].grad is None

    assert warned(workers[0].run, program) == []


def nap_weighted(gate, x):
    GATES[gate].wait(30)
    return weighted(x)


# -- contexts that are closed


def test_backward_after_the_context_was_closed_is_refused(workers):
    def program():
        x = torch.ones(2, requires_grad=True)
        with gw.context():
            y = gw.rpc_sync("w1", weighted, args=(x,))
        with pytest.raises(ContextClosed) as raised:
            y.sum().backward()
        return str(raised.value), x.grad

    text, gradient = workers[0].run(program)
    assert text == (
        "Could not find autograd context with id: 0: c0.0 is closed on w0\n"
        "hint: differentiate before the `with context()` block ends in which it was made"
    )
    assert gradient is None


@pytest.mark.parametrize("use", [gw.get_gradients, lambda id: gw.backward(id, [])])
def test_the_calls_that_name_a_closed_context_are_refused(workers, use):
    def program():
        with gw.context() as closed:
            pass
        with pytest.raises(ContextClosed, match=r"c0\.0 is closed on w0"):
            use(closed)
        with pytest.raises(UsageError, match="Could not find autograd context with id: 12345"):
            use(12345)

    workers[0].run(program)


def test_a_reference_cannot_be_differentiated_in_a_closed_context(workers):
    def program():
        with gw.context() as closed:
            loss = gw.remote("w1", weighted, args=(torch.ones((), requires_grad=True),))
        with pytest.raises(ContextClosed, match=r"c0\.0 is closed on w0"):
            loss.backward(closed)

    workers[0].run(program)


def test_a_user_of_a_reference_needs_a_context_id(workers):
    def program():
        with gw.context():
            loss = gw.remote("w1", weighted, args=(torch.ones((), requires_grad=True),))
            with pytest.raises(UsageError, match="User RRefs require 'dist_autograd_ctx_id'"):
                loss.backward()

    workers[0].run(program)


def test_a_reference_to_no_tensor_is_not_differentiated(workers):
    def program():
        with gw.context() as context:
            here, there = gw.RRef("text"), gw.remote("w1", name)
            gw.rpc_sync("w1", weighted, args=(torch.ones(1, requires_grad=True),))
            for rref in (here, there):
                with pytest.raises(UsageError, match=r"should contain a tensor for .backward\(\)"):
                    rref.backward(context)

    workers[0].run(program)


def test_a_second_backward_without_retain_graph_names_the_worker_that_freed_its_graph(workers):
    def program():
        x = torch.ones(2, requires_grad=True)
        with gw.context():
            y = gw.rpc_sync("w1", cubed, args=(x,)).sum()
            y.backward()
            first = x.grad.clone()
            with pytest.raises(RuntimeError) as raised:
                y.backward()
            return str(raised.value), first

    text, first = workers[0].run(program)
    assert text.startswith("RuntimeError on w1: Trying to backward through the graph a second time")
    assert first.tolist() == [3, 3]


# -- what every failure leaves behind


def failing_calls(gate):
    x = torch.ones(2, requires_grad=True)
    sent = x * 2
    with gw.context():
        for error, to, function, args, options in (
            (UnknownWorker, "w9", weighted, (sent,), {}),
            (NotSerializable, "w1", weighted, (sent, threading.Lock()), {}),
            (NotSerializable, "w1", make_lock, (sent,), {}),
            (NotExposed, "w1", _not_exposed, (sent,), {}),
            (NotExposed, "w1", lambda x: x, (sent,), {}),
            (ValueError, "w1", fail_with, (sent,), {}),
            (CallTimeout, "w1", nap, (gate, sent), {"timeout": 0.02}),
            (UsageError, "w1", weighted, (sent,), {"timeout": 0}),
        ):
            with pytest.raises(error):
                gw.rpc_sync(to, function, args=args, **options)
            with pytest.raises(error):
                gw.rpc_async(to, function, args=args, **options).wait()
        y = gw.rpc_sync("w1", weighted, args=(sent,))
        GATES[gate].set()
        y.sum().backward()
    assert x.grad.tolist() == [6, 6]
    return weakref.ref(sent), weakref.ref(y)


def fail_with(x):
    raise ValueError("with a tensor")


def test_no_failed_call_leaves_a_tensor_a_waiter_or_a_context(workers, gate):
    sent, received = workers[0].run(failing_calls, gate)

    def are_gone():
        gc.collect()
        return sent() is None and received() is None

    assert eventually(are_gone)
    assert_nothing_left(workers)


def test_a_context_pins_what_was_sent_in_it_only_until_it_is_closed(workers):
    def program():
        sent = torch.ones(2, requires_grad=True) * 2
        with gw.context():
            received = gw.rpc_sync("w1", weighted, args=(sent,))
            gone = weakref.ref(sent), weakref.ref(received)
            del sent, received
        return gone

    gone = workers[0].run(program)

    def are_gone():
        gc.collect()
        return [ref() for ref in gone] == [None, None]

    assert eventually(are_gone)


def test_contexts_are_forgotten_on_every_worker_when_their_block_ends(workers):
    def program(fails):
        with gw.context():
            gw.rpc_sync("w1", weighted_over, args=(["w2"], torch.ones(2, requires_grad=True)))
            assert [len(member.worker.engine.contexts) for member in workers] == [1, 1, 1]
            if fails:
                raise KeyError("in the block")

    workers[0].run(program, False)
    assert eventually(lambda: not leftovers(workers))
    with pytest.raises(KeyError):
        workers[0].run(program, True)
    assert eventually(lambda: not leftovers(workers))


# -- passes that fail


def grads():
    return [None if w.grad is None else w.grad.item() for w in WEIGHTS.values()]


def fragile_loss(x):
    """Over all workers and back: w1, w2, w0, w1."""
    return gw.rpc_sync("w1", fragile_over, args=(["w2", "w0", "w1"], x))


def break_hook(worker):
    """A hook on the worker's own leaf that raises while the worker is broken."""

    def hook(gradient):
        if worker in BROKEN:
            raise OwnError(f"broken on {worker}")

    return WEIGHTS[worker].register_hook(hook)


def break_post_hook(worker):
    def hook(leaf):
        if worker in BROKEN:
            raise OwnError(f"broken on {worker}")

    return WEIGHTS[worker].register_post_accumulate_grad_hook(hook)


def break_nothing(worker):
    """The user-written function on the way raises by itself."""


def broken_pass(workers, where, how, breaking):
    """One good pass, one that fails on a worker, and one good pass again, all in one context.

    The one that failed is over everywhere when it raises, and has put back the gradients of w1 and
    w2. Gives its error, and their gradients after the first pass and after the last.
    """

    def program():
        breaking(where)
        x = torch.tensor(1.0, requires_grad=True)
        with gw.context() as context:

            def differentiate():
                loss = fragile_loss(x)
                if how == "backward":
                    loss.backward()
                elif how == "grad":
                    torch.autograd.grad(loss, [x])
                elif how == "create_graph":
                    torch.autograd.grad(loss, [x], create_graph=True)
                else:
                    gw.backward(context, [loss])

            def state():
                if how == "map":
                    maps = [m.run(gw.get_gradients, context) for m in workers]
                    return [found.get(w) for found, w in zip(maps, WEIGHTS.values(), strict=True)]
                return [w.grad for w in WEIGHTS.values()]

            differentiate()
            before, values = state(), items(state())
            BROKEN.add(where)
            with pytest.raises(OwnError, match=f"broken on {where}") as raised:
                differentiate()
            assert [len(member.worker.engine.passes) for member in workers] == [0, 0, 0]
            assert all(state()[n] is before[n] for n in (1, 2))
            assert items(state())[1:] == values[1:]
            BROKEN.clear()
            differentiate()
            return raised.value, values[1:], items(state())[1:]

    return workers[0].run(program)


def items(gradients):
    return [None if gradient is None else gradient.item() for gradient in gradients]


@pytest.mark.usefixtures("_mended")
@pytest.mark.parametrize("how", ["backward", "grad", "create_graph", "map"])
@pytest.mark.parametrize("where", ["w1", "w2"])
def test_a_user_backward_that_raises_elsewhere_ends_the_pass_everywhere(workers, where, how):
    error, first, last = broken_pass(workers, where, how, break_nothing)

    assert isinstance(error, RemoteError)
    assert error.worker == where
    assert str(error).startswith(f"OwnError on {where}: broken on {where}")
    assert "in backward" in error.remote_traceback
    if how in ("backward", "map"):
        assert last == [2 * gradient for gradient in first]
    else:
        assert last == [None, None]


@pytest.mark.usefixtures("_mended")
@pytest.mark.parametrize("how", ["backward", "map"])
@pytest.mark.parametrize("where", ["w1", "w2"])
@pytest.mark.parametrize("breaking", [break_hook, break_post_hook])
def test_a_hook_that_raises_elsewhere_ends_the_pass_everywhere(workers, where, how, breaking):
    error, first, last = broken_pass(workers, where, how, breaking)

    assert error.worker == where
    assert last == [2 * gradient for gradient in first]


@pytest.mark.usefixtures("_mended")
@pytest.mark.parametrize("how", ["backward", "map"])
@pytest.mark.parametrize("breaking", [break_hook, break_nothing])
def test_a_hook_that_raises_at_the_root_ends_the_pass_everywhere(workers, how, breaking):
    error, first, last = broken_pass(workers, "w0", how, breaking)

    assert type(error) is OwnError  # raised here, so it is the very one
    assert last == [2 * gradient for gradient in first]


@pytest.mark.usefixtures("_mended")
@pytest.mark.parametrize("where", ["w0", "w1", "w2"])
def test_a_pass_that_failed_leaves_grad_none_where_it_was_none(workers, where):
    def program():
        x = torch.tensor(1.0, requires_grad=True)
        with gw.context():
            BROKEN.add(where)
            loss = fragile_loss(x)
            with pytest.raises(OwnError, match=f"broken on {where}"):
                loss.backward()
            assert WEIGHTS["w1"].grad is None
            assert WEIGHTS["w2"].grad is None

    workers[0].run(program)


@pytest.mark.usefixtures("_mended")
def test_a_retained_graph_can_be_differentiated_again_after_a_pass_over_it_failed(workers):
    def program():
        x = torch.tensor(1.0, requires_grad=True)
        with gw.context():
            loss = fragile_loss(x)
            loss.backward(retain_graph=True)
            once = grads()
            BROKEN.add("w2")
            with pytest.raises(OwnError):
                loss.backward(retain_graph=True)
            BROKEN.clear()
            loss.backward(retain_graph=True)
            return once, grads()

    once, twice = workers[0].run(program)
    assert twice[1:] == [2 * gradient for gradient in once[1:]]


@pytest.mark.usefixtures("_mended")
def test_a_pass_that_fails_leaves_other_contexts_alone(workers):
    def program(broken):
        x = torch.tensor(1.0, requires_grad=True)
        with gw.context():
            loss = fragile_loss(x)
            if broken:
                BROKEN.add("w1")
                with pytest.raises(OwnError):
                    loss.backward()
                BROKEN.clear()
            else:
                loss.backward()
        return x.grad

    workers[0].run(program, True)
    assert workers[2].run(program, False) is not None
    assert workers[0].run(program, False) is not None


@pytest.mark.usefixtures("_mended")
def test_a_pass_that_fails_within_a_served_function_says_so_to_the_caller(workers):
    def program():
        with gw.context():
            x = torch.tensor(1.0, requires_grad=True)
            BROKEN.add("w2")
            gw.rpc_sync("w1", backward_there, args=(x,))

    with pytest.raises(OwnError, match="broken on w2") as raised:
        workers[0].run(program)
    assert raised.value.worker == "w2"
    assert WEIGHTS["w2"].grad is None


def backward_there(x):
    gw.rpc_sync("w2", fragile_over, args=(["w0"], x)).backward()


@pytest.mark.slow
def test_a_pass_that_takes_too_long_names_what_it_waited_for(gate):
    WEIGHTS.update({f"w{n}": torch.tensor(n + 2.0, requires_grad=True) for n in range(2)})

    def program():
        x = torch.tensor(1.0, requires_grad=True)
        WEIGHTS["w1"].register_hook(lambda g: GATES[gate].wait(0.5) and None)
        with gw.context():
            loss = gw.rpc_sync("w1", weighted, args=(x,))
            with pytest.raises(BackwardTimeout) as raised:
                loss.backward()
            return raised.value

    with cluster(2, expose=[HERE], options=Options(timeouts=Timeouts(backward=0.1))) as hasty:
        error = hasty[0].run(program)
        assert isinstance(error, TimeoutError)
        assert "p0.1 was given up on w0 after 0.1 s" in str(error)
        assert "w1" in str(error)
        assert "hint: a longer Timeouts(backward=…)" in str(error)
        assert_nothing_left(hasty)
        assert WEIGHTS["w1"].grad is None
