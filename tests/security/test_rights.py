"""A peer speaks for itself: not for another's request, gradient, pass or reference."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import gradwire
from gradwire.agent.messages import Done, Failure
from gradwire.agent.requests.promise import Pending, RequestTable
from gradwire.autograd.graph.lineage import one, to_wire, union
from gradwire.autograd.messages import (
    Forget,
    Gradients,
    PassEnded,
    QueryContext,
    Release,
    RunDone,
    Start,
)
from gradwire.errors import BadMessage, OverLimit
from gradwire.ids import EdgeId, ForkId, PassId, RefId, StepId
from gradwire.optim.messages import Abort, Commit, Prepare
from gradwire.optim.shard import OptimizerHost
from gradwire.rpc.calls.client import Target
from gradwire.rpc.messages import (
    Accept,
    BackwardFrom,
    Body,
    Call,
    Drop,
    Fetch,
    Fork,
    Kept,
    Reference,
)
from gradwire.rpc.refs.refs import Value
from gradwire.testing import cluster
from gradwire.wire.message import IS_ANSWER, Frame, encode, kind_of
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
PLAIN = Body(b"\x93\x01\x91\x01\x91\x02", [], [], [])  # ((), {})


def echo(x):
    return x


def weights():
    return gradwire.RRef(torch.nn.Parameter(torch.ones(2)))


def secret():
    return torch.full((3,), 42.0)


@pytest.fixture
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made


def ask(worker, to, message):
    """A request past all checks of the sender's own."""
    deadline = worker.agent.clock.now() + 10
    _, promise = worker.agent.request(to, message, deadline=deadline, description="an attack")
    outcome = promise.wait(10)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def private_value(workers) -> RefId:
    """A value of w1 that nobody but w1 refers to."""
    return workers[1].worker.refs.keep_here(Value(secret())).ref


def test_an_answer_comes_from_whoever_was_asked():
    table = RequestTable()
    n = table.opened(Pending(1, "a call", 0.0, 1.0, None))
    with pytest.raises(BadMessage, match=f"w2 answers request {n}, which it was not asked"):
        table.answered(n, 2)
    assert table.answered(n, 1) is not None
    assert table.answered(n, 2) is None


def test_a_forged_answer_ends_the_connection_of_the_forger(workers):
    victim, forger = workers[0].worker, workers[2].worker
    limit = victim.agent.clock.now() + 10
    n = victim.agent._calls.opened(Pending(1, "a call", 0.0, limit, None))
    forged = Frame(kind_of(Done), IS_ANSWER, n, encode(Done()), ())
    forger.agent._connections.to(0, limit).send(forged, limit)
    assert eventually(lambda: victim.refusals.seen() == {"bad message": 1})
    assert victim.agent._calls.answered(n, 1) is not None


def test_a_value_is_fetched_by_its_holders_only(workers):
    ref = private_value(workers)
    for message in (Fetch(ref, None, 5.0), BackwardFrom(ref, 0, False, 5.0)):
        with pytest.raises(BadMessage, match=f"w0 does not hold {ref}"):
            ask(workers[0].worker, 1, message)
    assert workers[1].run(gradwire.refusals) == {"bad message": 2}


@pytest.mark.parametrize("maker", [0, 1, 2])
def test_to_ask_for_a_fork_does_not_make_a_holder(workers, maker):
    ref = private_value(workers)
    with pytest.raises(BadMessage, match=f"w0 has no right to f{maker}.99 of {ref}"):
        ask(workers[0].worker, 1, Fork(ref, ForkId(maker, 99), 0, 0))


def test_a_method_is_called_on_what_the_caller_holds(workers):
    ref = private_value(workers)
    worker = workers[0].worker
    data = worker.calls._bodies._codec
    skeleton = b"\x93\x01\x92\x01\x92\x40\x00\x91\x02"  # ((reference 0,), {})
    assert data is not None
    for fork, why in ((ForkId(0, 99), "w0 does not hold"), (ForkId(2, 99), "it did not make")):
        body = Body(skeleton, [], [], [Reference(ref, 1, fork)])
        with pytest.raises(BadMessage, match=why):
            ask(worker, 1, Call(".sum", body, None, True, False, 5.0))


def test_a_value_is_kept_under_numbers_of_ones_own(workers):
    for ref, fork in (
        (RefId(1, 5), ForkId(0, 6)),
        (RefId(2, 5), ForkId(2, 6)),
        (RefId(0, 5), ForkId(2, 6)),
        (RefId(0, 5), None),
    ):
        with pytest.raises(BadMessage, match="which is not its own"):
            ask(
                workers[0].worker,
                1,
                Call(f"{__name__}:secret", PLAIN, None, True, False, 5.0, Kept(ref, fork)),
            )
    assert not workers[1].worker.refs.statistics().owned


def test_nobody_lets_go_for_another(workers):
    held = workers[0].run(gradwire.remote, "w1", secret)
    assert workers[0].run(held.to_here)[0] == 42
    handle = held.handle
    with pytest.raises(BadMessage, match=f"w2 may not end {handle.fork}, which w0 holds"):
        ask(workers[2].worker, 1, Drop([(handle.ref, handle.fork)], 0))
    assert workers[0].run(held.to_here)[0] == 42


def test_nobody_accepts_for_another(workers):
    table = workers[0].worker.refs._table
    held = workers[0].run(gradwire.remote, "w1", secret)
    workers[0].run(held.to_here)
    child = table.pack(held.handle, 2)
    with pytest.raises(BadMessage, match=f"w1 may not end {child}, which w2 holds"):
        ask(workers[1].worker, 0, Accept(child))
    table.pack_undone(held.handle.ref, child)


def test_a_reference_may_be_passed_on_and_back(workers):
    """What holders do is none of this."""
    held = workers[0].run(gradwire.remote, "w1", secret)
    again = workers[0].run(gradwire.rpc_sync, "w2", echo, (held,))
    assert workers[0].run(again.to_here)[0] == 42
    home = workers[0].run(gradwire.rpc_sync, "w1", echo, (again,))
    assert workers[0].run(home.to_here)[0] == 42
    assert workers[0].run(held.rpc_sync().sum) == 126


def test_gradients_come_from_where_their_tensor_went(workers):
    def program():
        x = torch.ones(2, requires_grad=True)
        y = gradwire.rpc_sync("w1", echo, (x,))
        forged = Gradients(PassId(0, 1), EdgeId(0, 0), [False], [], [])
        say(workers[2].worker, 0, forged)
        assert eventually(lambda: refused(workers, 1))
        y.sum().backward()
        return x.grad

    assert torch.equal(workers[0].run(program), torch.ones(2))


@pytest.mark.parametrize("n", [7, -1, 1 << 40])
def test_gradients_of_an_edge_that_never_left_are_refused(workers, n):
    say(workers[2].worker, 0, Gradients(PassId(2, 1), EdgeId(0, n), [False], [], []))
    say(workers[2].worker, 0, Gradients(PassId(2, 1), EdgeId(1, 0), [False], [], []))
    assert eventually(lambda: workers[0].run(gradwire.refusals) == {"bad message": 2})
    assert_nothing_left(workers)


def test_an_edge_is_released_by_whom_it_leads_to(workers):
    def program():
        x = torch.ones(2, requires_grad=True)
        y = gradwire.rpc_sync("w1", echo, (x,))
        z = gradwire.rpc_sync("w2", echo, (x,))
        mine, theirs = sorted(workers[0].worker.engine.edges.sent)
        # The second is one of w2's own: a message that is refused releases nothing at all.
        for edges in ([mine], [theirs, mine], [mine, theirs]):
            say(workers[2].worker, 0, Release(edges))
        assert eventually(lambda: workers[0].run(gradwire.refusals) == {"bad message": 3})
        assert sorted(workers[0].worker.engine.edges.sent) == [mine, theirs]
        (y + z).sum().backward()
        return x.grad

    assert torch.equal(workers[0].run(program), torch.full((2,), 2.0))
    assert_nothing_left(workers)


def test_an_edge_that_never_left_is_not_released(workers):
    for edges in ([0], [1 << 62]):
        say(workers[2].worker, 0, Release(edges))
    assert eventually(lambda: workers[0].run(gradwire.refusals) == {"bad message": 2})
    assert_nothing_left(workers)


def test_a_pass_is_begun_and_ended_by_its_root(workers):
    agent = workers[2].worker.agent
    for message in (
        start(PassId(0, 1), 1, 0),
        PassEnded(PassId(0, 1), None),
    ):
        agent.tell(1, message, deadline=agent.clock.now() + 10)
    assert eventually(lambda: workers[1].run(gradwire.refusals) == {"bad message": 2})


def say(worker, to, message):
    """A message past all checks of the sender's own."""
    worker.agent.tell(to, message, deadline=worker.agent.clock.now() + 10)


def call_in(worker, to, context):
    """Call a function in a context that the caller has nothing to do with."""
    ask(worker, to, Call(f"{__name__}:secret", PLAIN, context, True, False, 5.0))


def refused(workers, count):
    return sum(worker.run(gradwire.refusals).get("bad message", 0) for worker in workers) == count


def in_a_context(attack, through=("w1",)):
    """The gradient of 1 after it was doubled by each of these; the attack is before backward."""
    x = torch.ones(1, requires_grad=True)
    with gradwire.context() as context:
        y = doubled(through, x)
        attack(context)
        y.backward()
    return x.grad.item()


def doubled(through, x):
    return gradwire.rpc_sync(through[0], doubled, (through[1:], x)) * 2 if through else x


@pytest.mark.parametrize("at", [0, 1])
def test_a_context_is_closed_by_its_opener(workers, at):
    def attack(context):
        say(workers[2].worker, at, Forget(context, []))
        assert eventually(lambda: refused(workers, 1))

    assert workers[0].run(in_a_context, attack) == 2
    assert_nothing_left(workers)


def test_who_calls_in_a_context_does_not_close_it_for_others(workers):
    def attack(context):
        call_in(workers[2].worker, 1, context)
        say(workers[2].worker, 1, Forget(context, []))
        assert eventually(lambda: refused(workers, 1))

    assert workers[0].run(in_a_context, attack) == 2
    assert_nothing_left(workers)


def test_a_context_is_not_closed_before_it_is_there(workers):
    say(workers[2].worker, 1, Forget(0, []))
    assert eventually(lambda: refused(workers, 1))

    assert workers[0].run(in_a_context, lambda _: None) == 2
    assert_nothing_left(workers)


@pytest.mark.parametrize("context", [-1, (1 << 63) - 1, 99 << 48])
def test_a_context_of_nobody_is_closed_by_nobody(workers, context):
    say(workers[2].worker, 1, Forget(context, []))

    assert eventually(lambda: refused(workers, 1))
    assert not workers[1].worker.engine.contexts.is_over(context)
    assert_nothing_left(workers)


def test_who_alone_has_called_in_a_context_does_not_close_it_either(workers):
    """It closes only its own; those who come later find it open."""
    hostile = workers[2].worker

    def attack(context):
        call_in(hostile, 1, context)
        say(hostile, 1, Forget(context, []))
        assert eventually(lambda: refused(workers, 1))
        x = torch.ones(1, requires_grad=True)
        gradwire.rpc_sync("w1", echo, (x,)).backward()
        assert x.grad == 1

    assert workers[0].run(in_a_context, attack, ["w0"]) == 2
    assert_nothing_left(workers)


def test_a_context_ends_where_workers_have_called_each_other_in_it():
    """Each of the two hears that it is closed from one of those who called it."""
    with cluster(4, expose=[HERE]) as workers:
        through = ["w1", "w2", "w3", "w2", "w3"]
        assert workers[0].run(in_a_context, lambda _: None, through) == 32
        assert_nothing_left(workers)
        assert refused(workers, 0)


def test_only_the_opener_of_a_context_tells_when_it_closes(workers):
    def attack(context):
        with pytest.raises(BadMessage, match=r"c0\.0 was not opened here"):
            ask(workers[2].worker, 1, QueryContext(context))

    assert workers[0].run(in_a_context, attack) == 2


def _gate(name):
    made = GATES[name] = threading.Event()
    return made


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        GATES["in"].set()
        assert GATES["out"].wait(10)
        return gradient


def gated(x):
    return Gated.apply(x)


@pytest.mark.parametrize("at", [0, 1])
def test_a_pass_is_failed_by_those_who_take_part(workers, at):
    """While it runs: w1 waits in its backward, and w0 for it."""
    failure = Failure("ValueError", "an attack", None, "", "w2")
    reached, opened = (_gate(name) for name in ("in", "out"))

    def train():
        x = torch.ones(1, requires_grad=True)
        y = gradwire.rpc_sync("w1", gated, (x,))
        forged = threading.Thread(target=attack)
        forged.start()
        y.backward()
        forged.join(10)
        return x.grad.item()

    def attack():
        assert reached.wait(10)
        (running,) = workers[0].worker.engine.passes.all()
        say(workers[2].worker, at, RunDone(running.id, False, failure))
        say(workers[2].worker, at, RunDone(running.id, False))
        assert eventually(lambda: refused(workers, 2))
        opened.set()

    assert workers[0].run(train) == 1
    assert_nothing_left(workers)


def test_a_step_is_taken_by_the_maker_of_its_optimizer(workers):
    """Not by one that does not hold the shard, nor in the name of who does."""
    hostile = workers[2].worker

    def train():
        weight = gradwire.rpc_sync("w1", weights)
        optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, [weight], lr=1.0)
        shard = optimizer._shards[1].handle.ref
        for step, why in ((StepId(2, 0), "w2 does not hold"), (StepId(0, 0), "another worker's")):
            alone = Prepare(shard, step, None, {}, 5.0, True, True)
            for message in (alone, Commit(shard, step, 5.0), Abort(shard, step, 5.0)):
                with pytest.raises(BadMessage, match=why):
                    ask(hostile, 1, message)
        optimizer.step()
        return refused(workers, 6)

    assert workers[0].run(train)


def test_calls_still_work(workers):
    target = Target(f"{__name__}:echo", (5,), {})
    worker = workers[0].worker
    assert worker.calls.call(1, target, worker.deadline(5)) == 5


RUNS = 4
BOUNDED = gradwire.Options(
    limits=gradwire.Limits(runs=RUNS), timeouts=gradwire.Timeouts(backward=30.0)
)


def start(pass_id, worker, *numbers, seconds=5.0):
    """Have a worker run from these edges of its own."""
    edges = to_wire(union([one(EdgeId(worker, n)) for n in numbers]))
    return Start(pass_id, 0, None, edges, None, False, False, seconds, None)


def starts(root, worker, numbers, count):
    """Passes over some edges of another, whose gradients will never come."""
    for n in range(count):
        yield start(PassId(root, n + 1), worker, *numbers, seconds=1e9)


def edges_to(worker, peer):
    """The numbers of the live edges that lead from one worker to another."""
    return [sent.edge.n for sent in worker.engine.edges.sent.values() if sent.peer == peer]


def passes_of(worker, root):
    return worker.engine.passes.coordinated_by(root)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("takes_part", [False, True], ids=["with no edge", "with one edge"])
def test_no_run_begins_over_edges_that_lead_to_others(at, takes_part):
    """It waits for gradients that nobody sends; no thread does, and the graph is not used up.

    So it is for whoever has received something else: an edge of one's own is no key to others.
    """
    with cluster(3, expose=[HERE], options=BOUNDED) as workers:
        victim = workers[at].worker
        leaf = torch.ones(1, requires_grad=True)
        own = workers[at].run(gradwire.rpc_sync, "w2", echo, (leaf,)) if takes_part else None

        def attack(_):
            edges = edges_to(victim, 1 - at)
            edges += edges_to(victim, 2)
            assert len(edges) == 1 + takes_part
            for message in starts(2, at, edges, 3 * RUNS):
                say(workers[2].worker, at, message)
            assert eventually(lambda: workers[at].run(gradwire.refusals) == {"over limit": 8})
            assert eventually(lambda: victim.agent.dispatch.active == 0)
            parked = passes_of(victim, 2)
            assert all(running.undo_log is None for running in parked)
            now = victim.agent.clock.now()
            assert all(running.deadline <= now + 30 for running in parked)

        assert workers[0].run(in_a_context, attack) == 2
        for parked in passes_of(victim, 2):
            parked.expire(victim.directory)
        del own
        assert_nothing_left(workers)


def test_a_coordinator_has_so_many_runs_at_once_and_no_more():
    with cluster(2, expose=[HERE], options=BOUNDED) as workers:
        hostile, victim = workers[0].worker, workers[1].worker

        def attack(_):
            for message in starts(0, 1, edges_to(victim, 0), 3 * RUNS):
                say(hostile, 1, message)
            assert eventually(lambda: workers[1].run(gradwire.refusals) == {"over limit": 8})
            assert eventually(lambda: victim.agent.dispatch.active == RUNS)
            now = victim.agent.clock.now()
            assert all(running.deadline <= now + 30 for running in passes_of(victim, 0))

        with pytest.raises(OverLimit, match="a peer has 4 runs open here already"):
            workers[0].run(in_a_context, attack)
        assert_nothing_left(workers)


def test_a_place_is_free_again_when_a_run_is_over():
    with cluster(2, expose=[HERE], options=BOUNDED) as workers:
        for _ in range(3 * RUNS):
            assert workers[0].run(in_a_context, lambda _: None) == 2


def finish(y):
    y.backward()
    return True


def test_a_worker_that_was_passed_a_tensor_may_be_the_root_of_a_pass():
    """w2 and w3 know nothing of each other: w3 is reached by way of w1."""
    with cluster(4, expose=[HERE], options=BOUNDED) as workers:

        def train():
            x = torch.ones(1, requires_grad=True)
            with gradwire.context():
                y = doubled(["w1", "w3"], x)
                assert gradwire.rpc_sync("w2", finish, (y,))
            return x.grad.item()

        for _ in range(2 * RUNS):
            assert workers[0].run(train) == 4
        assert_nothing_left(workers)


def test_a_pass_that_waits_to_begin_is_not_begun_twice():
    with cluster(3, expose=[HERE], options=BOUNDED) as workers:

        def attack(_):
            agent, victim = workers[2].worker.agent, workers[1].worker
            for _ in range(3 * RUNS):
                for message in starts(2, 1, edges_to(victim, 0), 1):
                    say(workers[2].worker, 1, message)
            ask(workers[2].worker, 1, Drop([(RefId(2, 0), ForkId(2, 0))], 0))
            assert eventually(lambda: agent.dispatch.active == victim.agent.dispatch.active == 0)
            assert len(passes_of(victim, 2)) == 1

        assert workers[0].run(in_a_context, attack) == 2
        assert workers[1].run(gradwire.refusals) == {}
        for parked in passes_of(workers[1].worker, 2):
            parked.expire(workers[1].worker.directory)
        assert_nothing_left(workers)


def test_an_end_of_a_pass_that_has_to_wait_is_told_so_often_and_no_more():
    """Each of them has a thread, until the function in the backward of w1 returns."""
    failure = Failure("ValueError", "an attack", None, "", "w0")
    reached, opened = (_gate(name) for name in ("in", "out"))
    with cluster(2, expose=[HERE], options=BOUNDED) as workers:
        hostile, victim = workers[0].worker, workers[1].worker

        def train():
            y = gradwire.rpc_sync("w1", gated, (torch.ones(1, requires_grad=True),))
            failing = threading.Thread(target=attack)
            failing.start()
            try:
                y.backward()
            finally:
                failing.join(10)

        def attack():
            assert reached.wait(10)
            (running,) = hostile.engine.passes.all()
            ended = PassEnded(running.id, failure)
            limit = hostile.agent.clock.now() + 10
            asked = [
                hostile.agent.request(1, ended, deadline=limit, description="an attack")[1]
                for _ in range(3 * RUNS)
            ]
            assert eventually(lambda: workers[1].run(gradwire.refusals) == {"over limit": 8})
            assert victim.agent.dispatch.active == 1 + RUNS
            opened.set()
            outcomes = [promise.wait(10) for promise in asked]
            assert sum(isinstance(outcome, OverLimit) for outcome in outcomes) == 2 * RUNS

        with pytest.raises(gradwire.RemoteError, match="ValueError on w0: an attack"):
            workers[0].run(train)
        assert_nothing_left(workers)


def weigh(x):
    return gated(x) * HERE.weight


def test_a_run_that_was_given_up_here_is_not_told_to_be_done(workers, monkeypatch):
    """Its time is over here before it is at the root; what it has done is put back."""
    reached, opened = (_gate(name) for name in ("in", "out"))
    weight = torch.full((1,), 3.0, requires_grad=True)
    monkeypatch.setattr(HERE, "weight", weight, raising=False)
    victim = workers[1].worker

    def train():
        x = torch.ones(1, requires_grad=True)
        with gradwire.context():
            y = gradwire.rpc_sync("w1", weigh, (x,))
            late = threading.Thread(target=expire)
            late.start()
            y.backward()

    def expire():
        assert reached.wait(10)
        (running,) = passes_of(victim, 0)
        running.expire(victim.directory)
        opened.set()

    with pytest.raises(gradwire.BackwardTimeout, match=r"p0\.1 was given up on w1"):
        workers[0].run(train)
    assert weight.grad is None
    assert_nothing_left(workers)


@pytest.fixture
def held_up(workers, monkeypatch):
    """A backward of w0 whose run on w1 is held up when its weight has a gradient.

    Meanwhile w0 says what it should not; then the run goes on.
    """
    reached, opened = (_gate(name) for name in ("in", "out"))
    weight = torch.full((1,), 3.0, requires_grad=True)
    monkeypatch.setattr(HERE, "weight", weight, raising=False)

    def train(attack):
        x = torch.ones(1, requires_grad=True)
        y = gradwire.rpc_sync("w1", weigh, (x,))
        attacking = threading.Thread(target=attack_held_up, args=(attack,))
        attacking.start()
        try:
            y.backward()
        finally:
            attacking.join(10)

    def attack_held_up(attack):
        assert reached.wait(10)
        try:
            (running,) = workers[0].worker.engine.passes.all()
            assert weight.grad == 1
            attack(running.id)
        finally:
            opened.set()

    yield lambda attack: workers[0].run(train, attack)
    assert_nothing_left(workers)
    assert workers[1].worker.engine._participant._locks.of(weight).unfinished == []


def test_a_pass_does_not_end_well_before_its_run(workers, held_up):
    def attack(pass_id):
        say(workers[0].worker, 1, PassEnded(pass_id, None))
        assert eventually(lambda: refused(workers, 1))

    held_up(attack)
    assert HERE.weight.grad == 1


def test_a_pass_does_not_begin_twice(workers, held_up):
    """What its first run has done is put back with the rest of it."""

    def attack(pass_id):
        say(workers[0].worker, 1, start(pass_id, 1, *edges_to(workers[1].worker, 0)))
        (running,) = workers[0].worker.engine.passes.all()
        assert eventually(lambda: running.error is not None)

    with pytest.raises(BadMessage, match=r"p0\.1 was begun twice"):
        held_up(attack)
    assert HERE.weight.grad is None


def test_a_step_of_another_gets_no_more_time_than_one_of_our_own():
    options = gradwire.Options(timeouts=gradwire.Timeouts(step=30.0))
    with cluster(2, expose=[HERE], options=options) as workers:
        owner = workers[1].worker

        def attack():
            weight = gradwire.rpc_sync("w1", weights)
            optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, [weight], lr=1.0)
            shard, step = optimizer._shards[1].handle.ref, StepId(0, 99)
            ask(workers[0].worker, 1, Prepare(shard, step, None, None, 1e9, True, False))
            locks = owner.part(OptimizerHost).locks
            (lock,) = locks._held.values()
            assert lock.deadline <= owner.agent.clock.now() + 30
            ask(workers[0].worker, 1, Abort(shard, step, 1e9))

        workers[0].run(attack)
