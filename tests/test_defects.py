"""The defects of torch.distributed.rpc and its autograd, by number: gradwire has none of them.

The numbers are those of a list of observed defects of the original (torch 2.13); each test says in
its first line what the original does. Where that is a hang, the pass here must end well within a
deadline far shorter than what the original was observed to hang for.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.errors import (
    BackwardTimeout,
    CallTimeout,
    ContextClosed,
    NotSerializable,
    UsageError,
)
from gradwire.options import Limits, Options, Timeouts
from gradwire.testing import cluster
from gradwire.testing.clock import ManualClock
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
PATIENCE = Options(timeouts=Timeouts(call=5.0, backward=5.0))
WEIGHTS: dict[str, torch.Tensor] = {}


@pytest.fixture
def workers():
    WEIGHTS.update({f"w{n}": torch.tensor(n + 2.0, requires_grad=True) for n in range(3)})
    with cluster(3, expose=[HERE], options=PATIENCE) as made:
        yield made
        WEIGHTS.clear()
        assert_nothing_left(made)


# -- what runs on the workers


class OwnError(Exception):
    """Exposed."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x))

    def modes(self):
        return [module.training for module in self.modules()]


def name():
    return gw.get_worker_info().name


def weight():
    return WEIGHTS[name()]


def weighted(x):
    return x * weight()


def applied(x, y):
    return x * y * weight()


def run_module(module, x):
    return module(x)


def is_training(rref):
    return rref.local_value().training


def two_results(x):
    return x * 2, x * weight()


def drop_nested(x):
    """Its own call's result is not used."""
    gw.rpc_sync("w2", weighted, args=(x * 3,))
    return x * weight()


def fail(*_):
    raise ValueError("on purpose")


def fail_with(kind):
    raise {"KeyError": KeyError, "IndexError": IndexError, "OwnError": OwnError}[kind](kind)


def nap(gate, x=None):
    GATES[gate].wait(30)
    return x


def ping(times, back):
    return 0 if times == 0 else 1 + gw.rpc_sync(back, ping, args=(times - 1, name()))


def hand_on_future(to):
    return gw.rpc_async(to, fail)


def wait_for_future(to):
    return gw.rpc_async(to, fail).wait()


def cubed(x):
    return x**3


def dense_squared(x):
    return x.to_dense() ** 2


# -- wrong gradients


def test_defect_01_a_parameter_as_an_argument_gets_its_gradient_at_home(workers):
    """The original rebuilds a Parameter from its data: its gradient ends on a throw-away copy."""

    def program():
        parameter = nn.Parameter(torch.tensor(5.0))
        with gw.context() as context:
            loss = gw.rpc_sync("w1", applied, args=(parameter, torch.tensor(2.0)))
            gw.backward(context, [loss], retain_graph=True)
            mapped = gw.get_gradients(context)[parameter]
            there = workers[1].run(gw.get_gradients, context)
            loss.backward()
        return mapped, parameter.grad, list(there)

    mapped, gradient, leaves_there = workers[0].run(program)
    assert mapped == gradient == 6
    assert [leaf is WEIGHTS["w1"] for leaf in leaves_there] == [True]  # and no copy of ours


def test_defect_01_a_module_as_an_argument_is_refused_rather_than_copied(workers):
    """The original copies a module with its parameters, whose gradients are then lost."""

    def program():
        with gw.context():
            gw.rpc_sync("w1", run_module, args=(nn.Linear(2, 1), torch.ones(2)))

    with pytest.raises(
        NotSerializable, match=r"args\[0\]: a value of type .*Linear cannot be serialized"
    ):
        workers[0].run(program)


def test_defect_02_a_graph_is_not_cut_outside_of_a_context(workers):
    """The original gives a fresh leaf; backward succeeds and the input gets nothing."""

    def program():
        x = torch.ones(2, requires_grad=True)
        gw.rpc_sync("w1", cubed, args=(x,)).sum().backward()
        return x.grad

    assert workers[0].run(program).tolist() == [3, 3]


def test_defect_02_a_graph_is_not_cut_in_another_thread(workers):
    """The original does not say that a thread has no context."""

    def program():
        x = torch.ones(2, requires_grad=True)
        with gw.context(), ThreadPoolExecutor(1) as threads:
            there = threads.submit(workers[0].run, gw.rpc_sync, "w1", cubed, args=(x,)).result()
            there.sum().backward()
        return x.grad

    assert workers[0].run(program).tolist() == [3, 3]


def test_defect_02_a_then_callback_is_part_of_the_graph(workers):
    """The original cuts the graph there, and the later backward hangs for ever."""

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context():
            first = gw.rpc_async("w1", weighted, args=(x,))
            second = first.then(lambda f: gw.rpc_sync("w2", weighted, args=(f.wait(),)))
            second.then(lambda f: f.wait() * 5).wait().backward()
        return x.grad

    assert workers[0].run(program) == 3 * 4 * 5
    assert (WEIGHTS["w1"].grad, WEIGHTS["w2"].grad) == (40, 30)


# -- hangs


def test_defect_03_an_unused_result_does_not_hang_backward(workers):
    """The original waits for ever for the gradient of a result that the loss does not use."""

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context() as context:
            gw.rpc_sync("w2", weighted, args=(x,))
            _, used = gw.rpc_sync("w1", two_results, args=(x,))
            used.backward(retain_graph=True)
            gw.backward(context, [used])
            return x.grad, gw.get_gradients(context)[x]

    assert workers[0].run(program) == (3, 3)
    assert WEIGHTS["w2"].grad is None


@pytest.mark.parametrize("failure", ["raises", "times out", "is too large"])
def test_defect_04_a_caught_failure_does_not_poison_the_context(gate, failure):
    """The original keeps an orphan send: retrying works, and backward then hangs for ever."""
    WEIGHTS.update(w1=torch.tensor(3.0, requires_grad=True))

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context() as context:
            if failure == "raises":
                with pytest.raises(ValueError, match="on purpose"):
                    gw.rpc_sync("w1", fail, args=(x,))
            elif failure == "times out":
                with pytest.raises(CallTimeout):
                    gw.rpc_sync("w1", nap, args=(gate, x), timeout=0.02)
            else:
                with pytest.raises(NotSerializable, match="over the limit of 4096"):
                    gw.rpc_sync("w1", nap, args=(gate, x, "x" * 5000))
            loss = gw.rpc_sync("w1", weighted, args=(x,))
            loss.backward(retain_graph=True)
            gw.backward(context, [loss])
            GATES[gate].set()
            return x.grad, gw.get_gradients(context)[x]

    options = Options(timeouts=PATIENCE.timeouts, limits=Limits(head=4096))
    with cluster(2, expose=[HERE], options=options) as small:
        assert small[0].run(program) == (3, 3)
        assert_nothing_left(small)


def test_defect_05_a_callee_may_drop_the_result_of_a_nested_call(workers):
    """The original's backward fails after the whole timeout."""

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context():
            gw.rpc_sync("w1", drop_nested, args=(x,)).backward()
        return x.grad

    assert workers[0].run(program) == 3
    assert WEIGHTS["w2"].grad is None


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "detach", "no_grad, grad argument"])
def test_defect_05_a_metric_inside_the_context_plays_no_part(workers, how):
    """In the original a metric of a remote parameter makes the later backward time out."""

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context():
            match how:
                case "no_grad":
                    with torch.no_grad():
                        metric = gw.rpc_sync("w1", weighted, args=(torch.tensor(1.0),))
                case "inference_mode":
                    with torch.inference_mode():
                        metric = gw.rpc_sync("w1", weighted, args=(torch.tensor(1.0),))
                case "detach":
                    metric = gw.rpc_sync("w1", weighted, args=(torch.tensor(1.0),)).detach()
                case _:
                    with torch.no_grad():
                        metric = gw.rpc_sync("w1", weighted, args=(x,))
            gw.rpc_sync("w2", weighted, args=(x,)).backward()
        return x.grad, metric.requires_grad

    assert workers[0].run(program) == (4, False)
    assert WEIGHTS["w1"].grad is None


def test_defect_05_one_of_two_losses_is_differentiated_alone(workers):
    """In the original the backward of one of two losses in a context times out."""

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context():
            generator = gw.rpc_sync("w1", weighted, args=(x,))
            gw.rpc_sync("w2", weighted, args=(x,))
            generator.backward()
        return x.grad

    assert workers[0].run(program) == 3
    assert WEIGHTS["w2"].grad is None


def test_defect_06_a_pass_may_be_tried_again_after_a_timeout_and_left_nothing_partial():
    """The original hangs for ever then, and some workers keep part of the gradients."""
    WEIGHTS.update({f"w{n}": torch.tensor(n + 2.0, requires_grad=True) for n in range(3)})
    clock = ManualClock()
    slow = [True]

    def takes_too_long(_):
        if slow:
            slow.clear()
            clock.advance(60)
            assert eventually(lambda: len(made[0].worker.engine.passes) == 0)

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        WEIGHTS["w1"].register_hook(takes_too_long)
        with gw.context():
            y = gw.rpc_sync("w2", weighted, args=(gw.rpc_sync("w1", weighted, args=(x,)),))
            with pytest.raises(BackwardTimeout, match="after 50 s"):
                y.backward(retain_graph=True)
            partial = [weight.grad for weight in WEIGHTS.values()]
            y.backward()
        return partial, x.grad

    options = Options(timeouts=Timeouts(backward=50, call=1000))
    with cluster(3, expose=[HERE], options=options, clock=clock) as made:
        partial, gradient = made[0].run(program)
        assert_nothing_left(made)

    assert partial == [None, None, None]
    assert gradient == 12
    assert (WEIGHTS["w1"].grad, WEIGHTS["w2"].grad) == (8, 6)


def test_defect_07_a_failed_future_is_never_a_result(workers):
    """The original returns the exception object of a failed future as if it were a value."""

    def program(function, expected):
        with pytest.raises(expected):
            gw.rpc_sync("w1", function, args=("w2",))
        with pytest.raises(expected):
            gw.rpc_async("w1", function, args=("w2",)).wait()
        with pytest.raises(expected):
            gw.remote("w1", function, args=("w2",)).to_here()

    workers[0].run(program, wait_for_future, ValueError)
    workers[0].run(program, hand_on_future, NotSerializable)


def test_defect_08_an_async_call_takes_a_snapshot_of_its_arguments(workers, gate):
    """In the original the callee may see what the caller wrote after the call: 200 instead of 2."""

    def program():
        x = torch.full((1000,), 2.0)
        under_way = [gw.rpc_async(to, nap, args=(gate, x)) for to in ("w0", "w1", "w2")]
        kept = gw.remote("w1", nap, args=(gate, x))
        x.fill_(200)
        GATES[gate].set()
        return [future.wait() for future in under_way] + [kept.to_here()]

    for got in workers[0].run(program):
        assert torch.equal(got, torch.full((1000,), 2.0))


@pytest.mark.parametrize("threads", [1, 4])
def test_defect_09_recursion_does_not_use_up_the_threads(threads):
    """The original dead-locks at depth 8 with 4 threads, beyond every timeout."""
    # Each nested call ends a little before the one around it, a tenth of its time if that is short.
    options = Options(timeouts=Timeouts(call=60.0), threads=threads)
    with cluster(2, expose=[HERE], options=options) as few:
        assert few[0].run(gw.rpc_sync, "w1", ping, args=(32, "w0")) == 32
        assert_nothing_left(few)


def test_defect_09_timeouts_hold_when_every_thread_is_busy(gate):
    """The original fails its futures on the very threads that are used up."""
    with cluster(2, expose=[HERE], options=Options(threads=1)) as few:
        busy = [member.run(gw.rpc_async, "w1", nap, args=(gate,)) for member in few]
        for member in few:
            with pytest.raises(CallTimeout, match="w1 did not answer"):
                member.run(gw.rpc_sync, "w1", name, timeout=0.02)
        GATES[gate].set()
        assert [future.wait() for future in busy] == [None, None]
        assert_nothing_left(few)


# -- contexts


def is_closed(member, context):
    try:
        member.worker.engine.contexts.find(context)
    except ContextClosed:
        return True
    except UsageError:  # not heard of yet
        return False
    return False


def test_defect_10_a_late_request_does_not_open_a_closed_context_again(gate):
    """In the original a cleanup that overtakes a request leaves a context behind for ever."""
    WEIGHTS["w1"] = torch.tensor(3.0, requires_grad=True)

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context() as context:
            gw.rpc_async("w1", nap, args=(gate,))  # takes the one thread
            for _ in range(3):
                gw.rpc_async("w1", weighted, args=(x,))
        return context

    with cluster(2, expose=[HERE], options=Options(threads=1)) as few:
        context = few[0].run(program)
        assert eventually(lambda: is_closed(few[1], context))
        GATES[gate].set()
        assert_nothing_left(few)


@pytest.mark.filterwarnings("ignore::gradwire.errors.GraphCutWarning")
def test_defect_11_a_call_succeeds_though_its_context_was_left(workers, gate):
    """The original raises that it could not find the context's data."""

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context():
            future = gw.rpc_async("w1", nap_weighted, args=(gate, x))
        GATES[gate].set()
        return future.wait()

    assert workers[0].run(program) == 6


def nap_weighted(gate, x):
    GATES[gate].wait(30)
    return x * weight()


def test_defect_12_passes_run_at_once_in_one_context(workers):
    """The original dies of an internal assertion."""

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context() as context, ThreadPoolExecutor(4) as threads:
            y = gw.rpc_sync("w2", weighted, args=(gw.rpc_sync("w1", weighted, args=(x,)),))
            passes = [
                threads.submit(copy_context().run, gw.backward, context, [y * n], True)
                for n in range(1, 5)
            ]
            for each in passes:
                each.result()
            return gw.get_gradients(context)[x]

    assert workers[0].run(program) == 12 * (1 + 2 + 3 + 4)


def test_defect_12_plain_backward_and_grad_cross_workers(workers):
    """In the original one is an internal assertion, the other says that the tensor is unused."""

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context():
            y = gw.rpc_sync("w1", weighted, args=(x,))
            (slope,) = torch.autograd.grad(y, [x], retain_graph=True)
            y.backward()
        return slope, x.grad

    assert workers[0].run(program) == (3, 3)


def test_defect_13_gradients_of_gradients_cross_workers(workers):
    """The original has no create_graph, and its gradients never require grad."""

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context():
            y = gw.rpc_sync("w1", cubed, args=(x,))
            (slope,) = torch.autograd.grad(y, [x], create_graph=True)
            (curve,) = torch.autograd.grad(slope, [x], create_graph=True)
            (jerk,) = torch.autograd.grad(curve, [x])
        return slope.detach(), curve.detach(), jerk

    assert workers[0].run(program) == (12, 12, 6)


@pytest.mark.parametrize("how", ["loss.backward", "backward(context, roots)"])
def test_defect_14_post_accumulate_and_multi_grad_hooks_run(workers, how):
    """The original does not run them."""
    ran = []

    def program():
        x = torch.tensor(2.0, requires_grad=True)
        leaf = WEIGHTS["w1"]
        leaf.register_post_accumulate_grad_hook(lambda p: ran.append(f"post {p.grad.item()}"))
        handle = torch.autograd.graph.register_multi_grad_hook(
            [leaf, leaf], lambda gs: ran.append(f"multi {[g.item() for g in gs]}")
        )
        with gw.context() as context:
            y = gw.rpc_sync("w1", weighted, args=(gw.rpc_sync("w1", weighted, args=(x,)),))
            if how == "loss.backward":
                y.backward()
            else:
                gw.backward(context, [y])
        handle.remove()

    workers[0].run(program)
    assert sorted(ran) == ["multi [12.0, 12.0]", "post 12.0"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("KeyError", KeyError), ("IndexError", IndexError), ("OwnError", OwnError)],
)
def test_defect_15_exceptions_keep_their_types_whichever_way_they_come(workers, kind, expected):
    """Through rpc_sync the original keeps only ValueError and TypeError."""

    def program():
        for raising in (
            lambda: gw.rpc_sync("w1", fail_with, args=(kind,)),
            lambda: gw.rpc_async("w1", fail_with, args=(kind,)).wait(),
            lambda: gw.remote("w1", fail_with, args=(kind,)).to_here(),
        ):
            with pytest.raises(expected, match=f"{kind} on w1"):
                raising()

    workers[0].run(program)


# -- references, modules, starting


def test_defect_16_a_module_held_by_a_reference_really_changes_its_mode(workers):
    """The original's RemoteModule.train(False) ignores its argument, and copies the module."""

    def program():
        module = gw.remote("w1", Net)
        assert module.rpc_sync().modes() == [True, True, True]
        for switch, mode in (("train", False), ("train", True), ("eval", False)):
            proxy = module.remote()
            switched = proxy.train(mode) if switch == "train" else proxy.eval()
            assert switched.owner_name() == "w1"
            assert switched.rpc_sync().modes() == [mode] * 3  # when it is switched
            assert module.rpc_sync().modes() == [mode] * 3  # it is the same module

    workers[0].run(program)


def test_defect_16_a_mode_is_switched_by_a_call_that_waits(workers):
    """`train` returns the module, which cannot be serialized; its mode is switched all the same."""

    def program():
        module = gw.remote("w1", Net)
        with pytest.raises(NotSerializable, match="Net cannot be serialized"):
            module.rpc_sync().train(False)
        return module.rpc_sync().modes()

    assert workers[0].run(program) == [False, False, False]


def test_defect_20_what_remote_returns_is_an_rref(workers):
    """In the original isinstance says no."""

    def program():
        return [isinstance(gw.remote(to, name), gw.RRef) for to in ("w0", "w1")]

    assert workers[0].run(program) == [True, True]


@pytest.mark.parametrize("mode", [False, True])
def test_defect_16_a_remote_module_takes_the_mode_it_is_told(workers, mode):
    """The original ignores the argument, and returns a copy of the module."""

    def program():
        module = gw.RemoteModule("w1", Net)
        assert module.train(mode) is module
        return gw.rpc_sync("w1", is_training, args=(module.get_module_rref(),))

    assert workers[0].run(program) is mode


def test_defect_21_a_process_may_join_again_under_another_number():
    """The original cannot. With real processes: tests/processes/test_joining.py."""
    for size in (2, 4, 3):
        with cluster(size, expose=[HERE]) as made:
            last = made[size - 1]
            assert last.run(gw.get_worker_info).id == size - 1
            assert last.run(gw.rpc_sync, "w0", name) == "w0"


@pytest.mark.filterwarnings("ignore:.*Sparse CSR.*:UserWarning")
def test_defect_23_sparse_csr_tensors_cross(workers):
    """The original cannot access their storage."""

    def program():
        x = torch.tensor([[0.0, 2.0], [3.0, 0.0]], requires_grad=True)
        with gw.context():
            gw.rpc_sync("w1", dense_squared, args=(x.to_sparse_csr(),)).sum().backward()
        return x.grad

    assert workers[0].run(program).tolist() == [[0, 4], [6, 0]]


@pytest.mark.slow  # torch imports what it runs meta tensors with
def test_defect_23_meta_tensors_cross(workers):
    """The original does not support them."""
    got = workers[0].run(gw.rpc_sync, "w1", torch.add, args=(torch.empty(3, device="meta"), 1))

    assert got.is_meta
    assert got.shape == (3,)
