"""A pass that fails leaves gradients as they were, keeps nothing alive, or says what it could not.

Test programs run on w0. What must happen in the middle of a pass happens in a hook.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch

import gradwire as gw
from gradwire.autograd.backward import coordinator, pass_ending
from gradwire.autograd.backward.participant import Participant
from gradwire.errors import ContextClosed, UsageError
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
LEAVES: dict[str, torch.Tensor] = {}
HOOKS: dict[str, object] = {}
"""What hooks in the graphs of served functions do, by name."""
HELD: list[weakref.ref] = []


@pytest.fixture
def workers():
    LEAVES["leaf"] = torch.ones(2, requires_grad=True)
    with cluster(3, expose=[HERE]) as made:
        yield made
        LEAVES.clear()
        HOOKS.clear()
        HELD.clear()
        assert_nothing_left(made)
        assert runs(made) == [0, 0, 0]


@pytest.fixture
def often():
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def runs(workers):
    """How many engine runs each of them takes to be part of a pass."""
    return [len(member.worker.engine.passes._by_run) for member in workers]


def are_gone(references):
    gc.collect()  # an exception and its frames are a cycle
    return all(reference() is None for reference in references)


def in_context(workers, program):
    def run():
        with gw.context() as context:
            program(context)

    workers[0].run(run)


# -- what runs on the workers


def times_leaf(x):
    return x * LEAVES["leaf"]


def times_all(x):
    return x * sum(LEAVES["many"], LEAVES["leaf"])


def of_leaf():
    return LEAVES["leaf"] * 1


def hooked(x, hook):
    y = x * 2
    y.register_hook(HOOKS[hook])
    return y


def of_many(hook):
    return hooked(sum(LEAVES["many"], LEAVES["leaf"]), hook) / 2


def hooked_leaf(hook):
    return hooked(LEAVES["leaf"], hook)


class Holds(torch.autograd.Function):
    """Its node holds something that can be seen to die."""

    @staticmethod
    def forward(ctx, x):
        ctx.held = torch.zeros(2)
        HELD.append(weakref.ref(ctx.held))
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def five_and_one_that_fails(x):
    return [*(Holds.apply(x) for _ in range(5)), hooked(x, "fail")]


def fail(_):
    raise ValueError("refused by a hook")


# -- gradients


def test_a_gradient_that_a_hook_has_replaced_is_put_back(workers):
    HOOKS["fail"] = fail
    leaf = LEAVES["leaf"]
    leaf.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clone()))

    def program(_):
        x = torch.ones(2, requires_grad=True)
        gw.rpc_sync("w1", times_leaf, args=(x,)).sum().backward()
        before, value = leaf.grad, leaf.grad.clone()
        y = gw.rpc_sync("w2", hooked, args=(x, "fail"))
        with pytest.raises(ValueError, match="refused by a hook"):
            gw.rpc_sync("w1", times_leaf, args=(y,)).sum().backward()
        assert leaf.grad is before
        assert torch.equal(leaf.grad, value)

    in_context(workers, program)


@pytest.mark.parametrize("is_used", [False, True])
def test_gradients_that_are_views_of_one_buffer_are_put_back(workers, caplog, is_used):
    """As with gradient_as_bucket_view: all of them have one version, which each addition raises."""

    def used(grad):  # after the leaves: the engine adds to them as soon as it can
        if is_used:
            buffer[0] = 100.0
        fail(grad)

    HOOKS["fail"], buffer = used, torch.arange(6.0)
    many = [torch.ones(2, requires_grad=True) for _ in range(3)]
    for n, leaf in enumerate(many):
        leaf.grad = buffer[2 * n : 2 * n + 2]
    LEAVES["many"], LEAVES["leaf"] = many[1:], many[0]
    views = [leaf.grad for leaf in many]

    def program(_):
        x = torch.ones(2, requires_grad=True)
        y = gw.rpc_sync("w2", hooked, args=(x, "fail"))
        with pytest.raises(ValueError, match="refused by a hook"):
            gw.rpc_sync("w1", times_all, args=(y,)).sum().backward()
        assert all(leaf.grad is view for leaf, view in zip(many, views, strict=True))

    in_context(workers, program)
    assert buffer[2:].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert buffer[:2].tolist() == ([100.0, 3.0] if is_used else [0.0, 1.0])
    assert ("stays" in caplog.text) is is_used


def test_a_hook_may_use_a_gradient_up_that_goes_to_the_map(workers):
    def use_up(used):
        def hook(p):
            seen.append(1)
            if len(seen) % 2 == 0:
                used.append(p.grad.tolist())
                p.grad = None

        seen = []
        return hook

    alone, expected = torch.ones(2, requires_grad=True), []
    alone.register_post_accumulate_grad_hook(use_up(expected))
    for _ in range(5):
        (alone * 1).sum().backward()
    used = []
    leaf = LEAVES["leaf"]
    leaf.register_post_accumulate_grad_hook(use_up(used))

    def program(context):
        for _ in range(5):
            gw.backward(context, [gw.rpc_sync("w1", of_leaf).sum()])
        found = workers[1].run(gw.get_gradients, context)
        assert torch.equal(found[leaf], alone.grad)

    in_context(workers, program)
    assert used == expected == [[2.0, 2.0], [2.0, 2.0]]
    assert leaf.grad is None


def test_a_run_that_was_over_when_its_context_closed_is_put_back_too(workers):
    leaf = LEAVES["leaf"]

    def close(_):
        """Runs on w2, when w1 has done its part and is told to forget the context."""
        (running,) = workers[1].worker.engine.passes.all()
        assert running.wait_for_run(20)
        assert leaf.grad is not None
        (context,) = workers[0].worker.engine.contexts.all()
        workers[0].worker.engine.close(context)
        assert eventually(lambda: len(workers[1].worker.engine.contexts) == 0)

    HOOKS["close"] = close

    def program(_):
        x = torch.ones(2, requires_grad=True)
        y = gw.rpc_sync("w2", hooked, args=(x, "close"))
        z = gw.rpc_sync("w1", times_leaf, args=(y,))
        # It "was" closed for a Send that waits already, it "is" for one that comes to wait.
        with pytest.raises(ContextClosed, match=r"c0\.0 (was|is) closed on w0"):
            z.sum().backward()
        assert leaf.grad is None

    in_context(workers, program)


def test_a_run_that_finds_its_context_closed_is_not_remembered(workers, monkeypatch):
    tokens = []

    def program(context):
        x = torch.ones(2, requires_grad=True)
        y = gw.rpc_sync("w1", times_leaf, args=(x,))
        engine = workers[1].worker.engine
        tokens.extend(weakref.ref(sent.token) for sent in engine.edges.sent.values())

        run = Participant._run

        def close(*args):  # the run has begun, the engine has not
            engine.close(context)
            run(*args)

        monkeypatch.setattr(Participant, "_run", close)
        with pytest.raises(ContextClosed, match=r"c0\.0 was closed on w1"):
            y.sum().backward()

    in_context(workers, program)
    assert runs(workers) == [0, 0, 0]
    assert eventually(lambda: are_gone(tokens))


@contextmanager
def a_run_that_does_not_return(monkeypatch):
    """w1 is in a hook when w2 fails the pass; gives what lets the hook go on."""
    monkeypatch.setattr(coordinator, "END_SECONDS", 0.05)
    monkeypatch.setattr(coordinator, "END_LATE_SECONDS", 0.05)
    monkeypatch.setattr(pass_ending, "END_LATE_SECONDS", 0.05)
    reached, goes_on = threading.Event(), threading.Event()

    def block(_):
        reached.set()
        goes_on.wait(30)

    def fail_meanwhile(gradient):
        assert reached.wait(30)
        fail(gradient)

    HOOKS.update(block=block, fail=fail_meanwhile)
    try:
        yield goes_on
    finally:
        goes_on.set()


def failed_meanwhile():
    a = gw.rpc_sync("w1", hooked_leaf, args=("block",))
    b = gw.rpc_sync("w2", hooked_leaf, args=("fail",))
    with pytest.raises(ValueError, match="refused by a hook") as failed:
        (a + b).sum().backward(retain_graph=True)
    assert failed.value.__notes__ == [
        "w1 has not confirmed that p0.1 was rolled back: until then no other pass can run there"
    ]
    return a


def test_a_worker_takes_part_again_when_it_has_put_back_what_failed(workers, monkeypatch):
    def program():
        a, c = failed_meanwhile(), gw.rpc_sync("w2", of_leaf)
        with pytest.raises(UsageError) as refused:
            a.sum().backward(retain_graph=True)
        assert str(refused.value) == (
            "p0.2 cannot begin until w1 confirms that p0.1 was rolled back\n"
            "hint: try again when it has answered"
        )
        c.sum().backward()  # a pass without w1 need not wait
        LEAVES["leaf"].grad = None
        goes_on.set()
        assert eventually(lambda: not workers[0].worker.engine.coordinator._rollbacks)
        assert LEAVES["leaf"].grad is None
        a.sum().backward()
        assert LEAVES["leaf"].grad is not None

    with a_run_that_does_not_return(monkeypatch) as goes_on:
        workers[0].run(program)
    assert_nothing_left(workers)


def test_a_worker_that_has_not_put_back_in_time_is_reported_once(workers, monkeypatch, caplog):
    monkeypatch.setattr(pass_ending, "_CONFIRM_SECONDS", 0.1)
    said = "w1 did not confirm that p0.1 was rolled back"

    def program():
        a = failed_meanwhile()
        assert eventually(lambda: not workers[0].worker.engine.coordinator._rollbacks)
        with pytest.raises(UsageError) as refused:
            a.sum().backward()
        assert str(refused.value) == (
            f"p0.2 was not begun: {said}\n"
            "hint: zero the gradients there; then the next pass is begun again"
        )
        goes_on.set()
        assert eventually(lambda: LEAVES["leaf"].grad is None)  # late, but put back
        gw.rpc_sync("w1", of_leaf).sum().backward()
        assert LEAVES["leaf"].grad is not None

    with a_run_that_does_not_return(monkeypatch) as goes_on:
        workers[0].run(program)
    assert f"w0: {said}" in [record.getMessage() for record in caplog.records]
    assert_nothing_left(workers)


@pytest.mark.parametrize("gives_up", [False, True], ids=["waits for the run", "gives up on it"])
def test_a_context_may_close_before_it_was_put_back(workers, monkeypatch, caplog, gives_up):
    if gives_up:  # w1 does not wait for its run and does not confirm: the run puts back by itself
        monkeypatch.setattr(pass_ending, "_RUN_SECONDS", 0.01)
        monkeypatch.setattr(pass_ending, "_CONFIRM_SECONDS", 0.1)

    with a_run_that_does_not_return(monkeypatch):
        in_context(workers, lambda _: failed_meanwhile())
        if gives_up:
            assert eventually(lambda: workers[0].worker.agent.in_flight == 0)
        else:
            assert workers[0].worker.agent.in_flight == 1
    assert_nothing_left(workers)
    assert eventually(lambda: LEAVES["leaf"].grad is None)
    said = ["w0: w1 did not confirm that p0.1 was rolled back"] if gives_up else []
    assert [record.getMessage() for record in caplog.records] == said


# -- what a failed pass keeps alive


@pytest.mark.parametrize("into_the_map", [False, True], ids=["grad", "map"])
def test_nothing_of_the_graph_outlives_a_failed_pass(workers, into_the_map):
    HOOKS["fail"] = fail

    def program(context):
        x = torch.ones(2, requires_grad=True)
        loss = sum(y.sum() for y in gw.rpc_sync("w1", five_and_one_that_fails, args=(x,)))
        with pytest.raises(ValueError, match="refused by a hook"):
            gw.backward(context, [loss]) if into_the_map else loss.backward()

    in_context(workers, program)

    assert len(HELD) == 5
    assert eventually(lambda: are_gone(HELD))


def test_nothing_of_the_graph_outlives_a_failed_grad(workers):
    HOOKS["fail"] = fail

    def program(_):
        x = torch.ones(2, requires_grad=True)
        loss = sum(y.sum() for y in gw.rpc_sync("w1", five_and_one_that_fails, args=(x,)))
        with pytest.raises(ValueError, match="refused by a hook"):
            torch.autograd.grad(loss, x)

    in_context(workers, program)

    assert len(HELD) == 5
    assert eventually(lambda: are_gone(HELD))


def test_a_run_that_ends_while_its_pass_fails_is_put_back_once(workers, caplog, often):
    """Both the thread that ran it and the one that hears from the root put it back."""
    leaf = LEAVES["leaf"]
    many = LEAVES["many"] = [torch.ones(2, requires_grad=True) for _ in range(50)]
    passes = workers[1].worker.engine.passes
    HOOKS["fail"] = fail

    def wait(_):
        assert eventually(lambda: all(one.error for one in passes.all()))

    HOOKS["wait"] = wait

    def program(_):
        x = torch.ones(2, requires_grad=True)
        for _ in range(10):
            y = gw.rpc_sync("w1", of_many, args=("wait",))
            z = gw.rpc_sync("w2", hooked, args=(x, "fail"))
            with pytest.raises(ValueError, match="refused by a hook"):
                (y + z).sum().backward()
        HOOKS["wait"] = lambda _: None
        gw.rpc_sync("w1", of_many, args=("wait",)).sum().backward()

    in_context(workers, program)
    assert [one.grad.tolist() for one in (leaf, *many)] == [[1, 1]] * 51
    assert "rolled back" not in caplog.text
