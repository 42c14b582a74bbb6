"""An edge lives as long as its Recv: whatever becomes of a result, no graph outlives its use.

After each test the tables of all workers are empty, without a context that ends and without help.
"""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gradwire as gw
from gradwire.autograd.graph import release
from gradwire.errors import CallTimeout, ContextClosed, NotSerializable, PeerLost
from gradwire.options import Limits, Options
from gradwire.testing import cluster
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually, flush
from tests.listening import overheard

HERE = sys.modules[__name__]
WEIGHTS: dict[str, torch.Tensor] = {}
STATES: dict[str, torch.Tensor] = {}


@pytest.fixture
def workers():
    WEIGHTS.update({f"w{n}": torch.full((2,), n + 2.0, requires_grad=True) for n in range(3)})
    with cluster(3, expose=[HERE]) as made:
        yield made
        WEIGHTS.clear()
        STATES.clear()
        assert_nothing_left(made)


def name():
    return gw.get_worker_info().name


def weighted(x):
    return x * WEIGHTS[name()]


def weighted_over(path, x):
    x = weighted(x)
    return gw.rpc_sync(path[0], weighted_over, args=(path[1:], x)) if path else x


def nap(gate, x):
    GATES[gate].wait(30)
    return weighted(x)


def number():
    return torch.ones(2, requires_grad=True)


USED: list[torch.Tensor] = []


class Resurrecting:
    """Garbage in a cycle whose finalizer uses a result: the graph of that result lives on."""

    def __init__(self, result: torch.Tensor, use) -> None:
        self.itself, self.result, self.use = self, result, use

    def __del__(self) -> None:
        USED.append(self.use(self.result))


@pytest.mark.parametrize("calls", [True, False])
def test_a_graph_that_a_finalizer_brings_back_to_life_is_not_released(workers, calls):
    """The collector clears weak references to it before it calls the finalizer."""
    x = torch.ones(2, requires_grad=True)
    use = (lambda y: gw.rpc_sync("w2", weighted, args=(y,))) if calls else (lambda y: 4 * y)

    def program():
        Resurrecting(gw.rpc_sync("w1", weighted, args=(x,)), use)
        gc.collect()
        for _ in range(5):  # these would take the release along
            gw.rpc_sync("w1", name)
        flush(workers)
        USED.pop().sum().backward()
        return x.grad

    assert workers[0].run(program).tolist() == [12, 12]


def edges_of(workers):
    """What each of them has sent and received that is alive."""
    tables = [member.worker.engine.edges for member in workers]
    return [(len(table.sent), len(table.recvs())) for table in tables]


NONE = [(0, 0)] * 3


def is_empty(workers):
    """Let releases go their way along a graph, from worker to worker."""
    gc.collect()
    flush(workers)
    return edges_of(workers) == NONE


# -- what a program drops


def test_two_lines_leave_nothing(workers):
    def program():
        x = number()
        y = gw.rpc_sync("w1", weighted_over, args=(["w2", "w0"], x))
        y.sum().backward()
        assert x.grad.tolist() == [24, 24]
        assert all(count > 0 for count, _ in edges_of(workers))

    workers[0].run(program)
    assert eventually(lambda: is_empty(workers))


def test_a_graph_lives_as_long_as_something_made_of_it_and_no_longer(workers):
    def program():
        return gw.rpc_sync("w1", weighted_over, args=(["w2"], number())) * 2

    kept = workers[0].run(program)
    before = edges_of(workers)
    flush(workers)
    assert edges_of(workers) == before
    workers[0].run(kept.sum().backward)
    del kept
    assert eventually(lambda: is_empty(workers))


def test_the_tick_releases_without_anybody_asking(workers):
    workers[0].run(gw.rpc_sync, "w1", weighted, (number(),))

    assert eventually(lambda: edges_of(workers) == NONE)


def test_a_served_argument_is_released_when_the_function_has_returned_without_it(workers):
    def program():
        x = number() * 2
        held = weakref.ref(x)
        assert gw.rpc_sync("w1", torch.numel, args=(x,)) == 2
        return held

    held = workers[0].run(program)
    assert eventually(lambda: held() is None)


# -- how it is told


def doubled(x):
    return 2 * x


def kept(x):
    STATES["x"] = x


@pytest.fixture
def without_a_tick(monkeypatch):
    monkeypatch.setattr(release, "_TICK_SECONDS", 3600.0)
    with overheard(2, expose=[HERE]) as (workers, said):
        yield workers, said
        flush(workers)
        assert_nothing_left(workers)


def test_in_a_loop_releases_ride_on_calls_and_answers(without_a_tick):
    workers, said = without_a_tick

    def program():
        x, most = number(), 0
        for _ in range(20):
            gw.rpc_sync("w1", doubled, args=(x,)).sum().backward()
            most = max(most, *[len(edges.sent) + len(edges.received) for edges in tables])
        return most

    tables = [member.worker.engine.edges for member in workers]

    assert workers[0].run(program) <= 4
    assert set(said.names()) == {"Call", "Result", "Start", "Gradients"}


def test_the_end_of_a_context_takes_along_what_its_opener_has_received(without_a_tick):
    workers, said = without_a_tick
    near, far = (member.worker.engine for member in workers)

    def program():
        with gw.context():
            kept.append(gw.rpc_sync("w1", doubled, args=(number(),)))
            kept.append(gw.rpc_sync("w1", doubled, args=(kept[0].detach(),)))

    kept: list[torch.Tensor] = []
    workers[0].run(program)

    assert near.edges.to_tell == []  # no other message need tell it
    assert eventually(lambda: not far.edges.sent)
    assert said.names()[-1] == "Forget"


def test_what_rides_on_an_answer_is_heard_though_nobody_reads_it(without_a_tick):
    workers, _ = without_a_tick
    near, far = (member.worker.engine for member in workers)
    workers[0].run(gw.rpc_sync, "w1", kept, (number(),))
    assert len(near.edges.sent) == 1
    STATES.clear()

    unread = workers[0].run(gw.rpc_async, "w1", torch.numel, (torch.ones(2),))

    assert eventually(lambda: not near.edges.sent)
    assert not far.edges.to_tell
    assert unread.wait() == 2


def test_what_a_call_takes_along_is_told_by_the_next_if_it_does_not_leave(without_a_tick):
    workers, _ = without_a_tick
    near, far = (member.worker.engine for member in workers)
    result = workers[0].run(gw.rpc_sync, "w1", doubled, (number(),))
    del result
    assert near.edges.to_tell == [1]

    with pytest.raises(NotSerializable):
        workers[0].run(gw.rpc_sync, "w1", torch.numel, (torch.ones(2), object()))
    huge = gw.Limits(head=1)
    near._agent.limits, before = huge, near._agent.limits
    with pytest.raises(NotSerializable):
        workers[0].run(gw.rpc_sync, "w1", torch.numel, (torch.ones(2),))
    near._agent.limits = before
    assert near.edges.to_tell == [1]

    workers[0].run(gw.rpc_sync, "w1", torch.numel, (torch.ones(2),))
    assert near.edges.to_tell == []
    assert not far.edges.sent


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_release_is_answered_at_once_only_if_nothing_waits_for_the_tick(
    without_a_tick, is_queued
):
    """In a loop of training something always waits: two workers would answer without end."""
    workers, said = without_a_tick
    near, far = (member.worker.engine for member in workers)
    workers[0].run(gw.rpc_sync, "w1", kept, (number(),))
    result = workers[0].run(gw.rpc_sync, "w1", doubled, (number(),))
    if is_queued:
        STATES.clear()
        assert far.edges.to_tell == [0]
    said.clear()
    del result
    near.releases.flush()

    assert eventually(lambda: not far.edges.sent)
    if is_queued:
        assert far.edges.to_tell == [0]
        assert said.names() == ["Release"]
    else:
        assert eventually(lambda: len(near.edges.sent) == 1)
    STATES.clear()


# -- results that nobody takes


def test_a_future_that_nobody_waits_for_is_released(workers):
    def program():
        for _ in range(5):
            gw.rpc_async("w1", weighted, args=(number(),))

    workers[0].run(program)
    assert eventually(lambda: is_empty(workers))


def test_a_value_kept_here_whose_reference_died_before_it_was_made_is_dropped(gate):
    def program():
        busy = gw.rpc_async("w0", nap, args=(gate, torch.ones(2)))  # on the only thread
        kept = gw.remote("w0", doubled, args=(gw.rpc_sync("w1", doubled, args=(number(),)),))
        del kept
        GATES[gate].set()
        busy.wait()

    WEIGHTS["w0"] = torch.ones(2)
    with cluster(2, expose=[HERE], options=gw.Options(threads=1)) as workers:
        workers[0].run(program)
        assert_nothing_left(workers)


def test_a_result_that_comes_too_late_is_released(workers, gate):
    def program():
        with pytest.raises(CallTimeout):
            gw.rpc_sync("w1", nap, args=(gate, number()), timeout=0.02)
        GATES[gate].set()

    workers[0].run(program)
    assert eventually(lambda: is_empty(workers))


def test_a_call_that_was_cancelled_is_released(workers, gate):
    def program():
        future = gw.rpc_async("w1", nap, args=(gate, number()))
        future.cancel()
        GATES[gate].set()

    workers[0].run(program)
    assert eventually(lambda: is_empty(workers))


def test_a_value_that_was_fetched_and_not_used_is_released(workers):
    def program():
        rref = gw.remote("w1", weighted, args=(number(),))
        for _ in range(3):
            rref.to_here()
        flush(workers)
        assert eventually(lambda: len(workers[0].worker.engine.edges.received) == 0)
        x = rref.to_here()
        x.sum().backward()  # the value itself has kept its graph

    workers[0].run(program)
    assert eventually(lambda: is_empty(workers))


def test_a_result_that_is_read_without_gradients_is_released(workers):
    def program():
        future = gw.rpc_async("w1", weighted, args=(number(),))
        with torch.no_grad():
            return future.wait()

    kept = workers[0].run(program)
    workers[0].run(lambda: None)
    assert kept.tolist() == [3, 3]
    del kept
    assert eventually(lambda: is_empty(workers))


def fail(_):
    raise ValueError("refused by a hook")


@pytest.mark.parametrize("where", ["w0", "w1", "w2"])
def test_gradients_with_a_graph_that_a_failed_pass_does_not_take_are_released(workers, where):
    """Under create_graph gradients cross by edges too, and some arrive for nobody."""

    def program():
        WEIGHTS[where].register_hook(fail)
        x = number()
        through = [gw.rpc_sync("w1", weighted_over, args=(["w2", "w0"], x * n)) for n in (1, 2)]
        loss = (sum(through) ** 2).sum()
        with pytest.raises(ValueError, match="refused by a hook"):
            loss.backward(create_graph=True)
        return loss.detach()

    workers[0].run(program)
    for weight in WEIGHTS.values():
        weight.grad = None  # w0's may have one with a graph: a failed backward of one's own stays
    assert eventually(lambda: is_empty(workers))


# -- state that a served function keeps


def step(session, x):
    """A recurrent state of the callee, which is never detached."""
    kept = STATES.get(session)
    STATES[session] = weighted(x) if kept is None else kept * 0.5 + weighted(x)
    return STATES[session] * 2


def forget(session):
    del STATES[session]


def in_one_process(values):
    """The same steps, and the same backwards after some of them."""
    weight, state, leaves = torch.full((2,), 3.0, requires_grad=True), None, []
    for n, value in enumerate(values):
        x = torch.full((2,), value, requires_grad=True)
        leaves.append(x)
        state = x * weight if state is None else state * 0.5 + x * weight
        if n % 2:
            (state * 2).sum().backward(retain_graph=True)
    return [x.grad for x in leaves], weight.grad


def test_state_that_several_callers_build_over_steps_is_exact_and_freed_when_dropped(workers):
    values = [1.0, -2.0, 3.0, 0.5, -1.0, 4.0]
    leaves = [torch.full((2,), value, requires_grad=True) for value in values]

    def one_step(n):
        y = gw.rpc_sync("w1", step, args=("shared", leaves[n]))
        if n % 2:
            y.sum().backward(retain_graph=True)

    for n in range(len(values)):
        workers[0 if n % 3 else 2].run(one_step, n)
    expected, weight = in_one_process(values)

    assert all(torch.equal(x.grad, want) for x, want in zip(leaves, expected, strict=True))
    assert torch.equal(WEIGHTS["w1"].grad, weight)
    flush(workers)
    assert sum(sent for sent, _ in edges_of(workers)) >= len(values)  # the state holds them all
    workers[0].run(gw.rpc_sync, "w1", forget, ("shared",))
    assert eventually(lambda: is_empty(workers))


def test_state_that_is_detached_now_and_then_does_not_pile_up(workers):
    def program():
        for n in range(30):
            gw.rpc_sync("w1", step, args=("own", number())).sum().backward()
            STATES["own"] = STATES["own"].detach()
            if n % 10 == 9:
                assert eventually(lambda: is_empty(workers))

    workers[0].run(program)


def test_callers_that_share_a_state_at_once_leave_nothing(workers):
    def train(who, session):
        def program():
            for _ in range(10):
                x = number()
                gw.rpc_sync("w1", step, args=(session, x)).sum().backward(retain_graph=True)
                assert x.grad.tolist() == [6, 6]

        workers[who].run(program)

    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(train, who, str(n)) for n, who in enumerate((0, 2, 0, 2))]
        for run in runs:
            run.result(60)
    for n in range(4):
        forget(str(n))
    assert eventually(lambda: is_empty(workers))


# -- contexts


def test_what_was_made_outside_may_be_used_in_a_context_and_outlives_it(workers):
    def program():
        x = number()
        outside = gw.rpc_sync("w1", weighted, args=(x,))
        with gw.context() as context:
            y = gw.rpc_sync("w2", weighted, args=(outside,))
            gw.backward(context, [y.sum()], retain_graph=True)
            assert gw.get_gradients(context)[x].tolist() == [12, 12]
            y.sum().backward(retain_graph=True)
            assert x.grad.tolist() == [12, 12]
        outside.sum().backward(retain_graph=True)
        assert x.grad.tolist() == [15, 15]
        with pytest.raises((ContextClosed, PeerLost), match="closed"):
            y.sum().backward(retain_graph=True)
        assert x.grad.tolist() == [15, 15]

    workers[0].run(program)
    assert eventually(lambda: is_empty(workers))


def test_what_was_made_in_a_context_may_be_used_outside_while_it_is_open(workers):
    def program():
        x = number()
        with gw.context():
            inside = gw.rpc_sync("w1", weighted, args=(x,))

            def outside():
                z = gw.rpc_sync("w2", weighted, args=(inside,))
                z.sum().backward(retain_graph=True)
                return z

            z = contextvars.Context().run(workers[0].run, outside)
            assert x.grad.tolist() == [12, 12]
        with pytest.raises((ContextClosed, PeerLost), match="closed"):
            z.sum().backward()

    workers[0].run(program)
    assert eventually(lambda: is_empty(workers))


def test_the_end_of_a_context_releases_what_its_tensors_still_hold(workers):
    def program():
        x = number() * 2
        held = weakref.ref(x)
        with gw.context():
            kept = gw.rpc_sync("w1", weighted_over, args=(["w2"], x))
            STATES["kept"] = x  # so has w1 something of it, and w0
        return kept, held

    kept, held = workers[0].run(program)
    assert eventually(lambda: [sent for sent, _ in edges_of(workers)] == [0, 0, 0])
    STATES.clear()
    assert eventually(lambda: gc.collect() is not None and held() is None)
    with pytest.raises(ContextClosed, match=r"c0\.0 is closed on w0"):
        workers[0].run(kept.sum().backward)


# -- peers that are lost


def test_a_context_that_stays_open_forgets_the_edges_that_are_over(workers):
    x = torch.ones(2, requires_grad=True)

    def program():
        with gw.context() as context:
            kept = gw.rpc_sync("w1", weighted, args=(x,))
            for _ in range(1100):
                gw.rpc_sync("w1", weighted, args=(x,))
            engines = [member.worker.engine for member in workers[:2]]
            known = [engine.contexts.find(context) for engine in engines]
            sizes = [len(each.sent) + len(each.received) for each in known]
            kept.sum().backward()
        return sizes

    assert max(workers[0].run(program)) <= 1100
    assert x.grad.tolist() == [3, 3]


def test_a_graph_through_a_lost_worker_raises_and_names_the_edge_and_the_worker(workers):
    def program():
        x = number()
        direct = gw.rpc_sync("w1", weighted, args=(x,))
        behind = gw.rpc_sync("w2", weighted_over, args=(["w1"], x))
        other = gw.rpc_sync("w2", weighted, args=(x,))
        workers[1].worker.close()
        assert eventually(lambda: not workers[0].worker.agent.is_connected(1))
        with pytest.raises(PeerLost, match=r"e1\.\d+ came from w1|e0\.\d+ .*w1"):
            direct.sum().backward(retain_graph=True)
        with pytest.raises(PeerLost, match="w1"):
            behind.sum().backward(retain_graph=True)
        assert x.grad is None
        assert WEIGHTS["w2"].grad is None
        other.sum().backward()
        assert x.grad.tolist() == [4, 4]

    with cluster(3, expose=[HERE]) as workers:
        workers[0].run(program)
        rest = [workers[0], workers[2]]
        assert_nothing_left(rest)


def kept_over(path, x):
    """The owner keeps the result: the caller fetches it from there."""
    return gw.remote(path[0], weighted, args=(weighted(x),))


def test_a_graph_that_two_others_have_lost_each_other_in_names_them(workers):
    """The connection of w1 and w2 is lost, w0 has lost nobody, and w1 releases what came of it."""

    def program():
        x = number()
        y = gw.rpc_sync("w1", kept_over, args=(["w2"], x)).to_here()
        agent = workers[1].worker.agent
        agent._lost(2, PeerLost("the connection was reset"), None)
        sent = workers[0].worker.engine.edges.sent
        assert eventually(lambda: not [edge for edge in sent.values() if edge.peer == 1])
        text = r"e0\.\d+ was dropped here: w1 or w2 was lost, or has lost another"
        with pytest.raises(PeerLost, match=text) as raised:
            y.sum().backward()
        assert raised.value.peer == ""  # one of them: nobody here knows which
        assert x.grad is None

    # Not the fixture's workers, on which nothing may be left: w2 keeps what w1 does not ask for.
    with cluster(3, expose=[HERE]) as workers:
        workers[0].run(program)


# -- a release that does not leave


def test_what_a_call_could_not_take_along_is_sent_by_the_next_tick(workers):
    """In a loop of training a call always follows, so the rest would be queued for ever."""
    releases, edges = workers[0].worker.engine.releases, workers[0].worker.engine.edges
    releases._late = {1, 2}
    for worker, count in ((1, 100), (2, 10)):
        for n in range(count):
            edges.came_from(worker).untold[n] = None
        releases.rode(worker, releases.riding_to(worker))

    assert releases._late == {1}
    assert [len(edges.came_from(worker).untold) for worker in (1, 2)] == [36, 0]
    edges.from_peers.clear()


@pytest.mark.parametrize("limits", [Limits(head=2048), Limits(elements=64)])
def test_a_release_is_within_the_limits_of_a_message(limits):
    def program():
        kept = [gw.rpc_sync("w1", torch.neg, args=(number(),)) for _ in range(300)]
        kept.clear()

    with cluster(2, options=Options(limits=limits)) as workers:
        workers[0].run(program)
        assert_nothing_left(workers)
        assert not workers[1].run(gw.refusals)


def test_a_release_that_cannot_leave_is_repeated(workers, monkeypatch):
    engine, agent = workers[0].worker.engine, workers[0].worker.agent
    kept = workers[0].run(gw.rpc_sync, "w1", weighted, (number(),))
    channel = agent._connections.to(1, agent.clock.now() + 10)
    with monkeypatch.context() as patch:
        patch.setattr(channel._outgoing, "_capacity", 0)  # w1 takes nothing
        patch.setattr(release, "_SECONDS", 0.01)
        del kept
        assert eventually(lambda: not engine.edges.received)
        for _ in range(3):
            engine.releases.flush()
        assert len(workers[1].worker.engine.edges.sent) == 1
        assert eventually(lambda: engine.edges.to_tell)  # unless the tick has it in its hands
    assert eventually(lambda: is_empty(workers))


def test_a_finalizer_that_calls_is_not_in_the_way_of_releases(workers):
    """Graphs die where a Release is served, and with them objects of the program."""
    called = threading.Event()

    class Calls:
        def __del__(self):
            workers[0].run(gw.rpc_sync, "w2", weighted, (number(),))
            called.set()

    def program():
        x = number() * 2
        x.grad_fn.register_hook(lambda *_, held=Calls(): None)  # noqa: B008
        gw.rpc_sync("w1", weighted, args=(x,))

    workers[0].run(program)
    assert called.wait(10)
    assert eventually(lambda: is_empty(workers))
