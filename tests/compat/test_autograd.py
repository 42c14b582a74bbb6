"""gradwire behind the face of torch.distributed.autograd: names, graphs, errors, gradients."""

from __future__ import annotations

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd import Function
from torch.autograd.profiler import profile
from torch.nn.functional import embedding_bag

import gradwire
from gradwire import GraphCutWarning
from gradwire.compat import autograd as dist_autograd
from gradwire.rpc.behavior import Behavior
from gradwire.testing import cluster
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
MANNER = Behavior(edge_per_message=True, leaves_outside_contexts=True)
RECV = "torch::distributed::autograd::RecvRpcBackward"
SEND = "torch::distributed::autograd::SendRpcBackward"
LEAF = torch.ones(2, requires_grad=True)


@pytest.fixture
def workers():
    with cluster(4, expose=[HERE], behavior=MANNER) as made:
        yield made
        assert_nothing_left(made)


def on_w0(workers, program):
    return workers[0].run(program)


def on_a_thread_of_w0(workers, program):
    """For a program that leaves its thread in a context that is gone."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(workers[0].run, program).result(30)


# -- what the workers run


def added(a, b):
    return torch.add(a, b)


def nothing(*_):
    return None


def two_of(a, b):
    return a * 2, b * 3


def split_in_two(t):
    return torch.split(t, 1)


def own_leaf():
    return LEAF


def forwarded(others, a, b):
    if not others:
        return added(a, b)
    return gradwire.rpc_sync(others[0], forwarded, args=(others[1:], a, b))


def failing(_):
    raise ValueError("on purpose")


class Boom(Function):
    armed = True

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        if Boom.armed:
            raise Exception("bwd boom")
        return gradient


def with_boom(a, b):
    return Boom.apply(a + b)


def slow_leaf(gate):
    assert GATES[gate].wait(10)
    return torch.ones(2, requires_grad=True)


def gradient_of_reference(context_id, reference):
    return dist_autograd.get_gradients(context_id)[reference.local_value()]


def introspected(context_id):
    """How many sends and receives this worker has, and whom it knows."""
    found = dist_autograd._retrieve_context(context_id)
    sends, recvs = found._send_functions(), found._recv_functions()
    return len(sends), len(recvs), sorted(found._known_worker_ids())


def graph_here(context_id):
    """What each of this worker's send functions leads to: by name, and how many nodes that are."""
    sends = dist_autograd._retrieve_context(context_id)._send_functions().values()
    assert {send.name() for send in sends} == {SEND}
    return [followed_by(send) for send in sends]


def introspected_or_none(context_id):
    return introspected(context_id) if knows(context_id) else None


def followed_by(*nodes):
    following = [node for last in nodes for node, _ in last.next_functions]
    return [node.name() for node in following], len(set(following))


def made_of(context_id):
    """The same for what the first of the send functions leads to."""
    first, *_ = dist_autograd._retrieve_context(context_id)._send_functions().values()
    return followed_by(*(node for node, _ in first.next_functions))


def knows(context_id):
    try:
        dist_autograd._retrieve_context(context_id)
    except RuntimeError:
        return False
    return True


def debug_info():
    return dist_autograd._get_debug_info()


def leaf(sparse=False):
    t = torch.ones(2, 2)
    return (t.to_sparse() if sparse else t).requires_grad_()


# -- contexts and their ids


def test_the_ids_of_contexts_carry_their_worker():
    with cluster(3, behavior=MANNER) as workers:
        for number in (0, 2):

            def program(number=number):
                assert dist_autograd._get_max_id() == (number << 48) + 281474976710655
                with dist_autograd.context() as context_id:
                    found = dist_autograd._retrieve_context(context_id)
                    assert found._context_id() == context_id
                    assert context_id >> 48 == number
                    dist_autograd._is_valid_context(context_id)
                return context_id

            assert workers[number].run(program) == number << 48
            assert workers[number].run(program) == (number << 48) + 1


@pytest.mark.parametrize(
    "use",
    [
        dist_autograd._retrieve_context,
        dist_autograd._is_valid_context,
        dist_autograd._release_context,
        dist_autograd.get_gradients,
        lambda id: dist_autograd.backward(id, [LEAF.sum()]),
    ],
)
def test_a_context_that_is_not_there_is_refused_by_its_id(workers, use):
    def program():
        with dist_autograd.context() as context_id:
            pass
        for id in (context_id, 100):
            with pytest.raises(
                RuntimeError, match=f"Could not find autograd context with id: {id}"
            ):
                use(id)

    on_w0(workers, program)


def test_contexts_do_not_nest(workers):
    def program():
        said = "Already have an autograd context id for this thread"
        with dist_autograd.context():
            with pytest.raises(RuntimeError, match=said), dist_autograd.context():
                pass
            with pytest.raises(RuntimeError, match=said):
                dist_autograd._new_context()

    on_w0(workers, program)


def test_a_context_may_be_opened_and_released_without_a_block(workers):
    def program():
        new = dist_autograd._new_context()
        assert dist_autograd._current_context()._context_id() == new._context_id()
        gradwire.rpc_sync("w1", nothing, args=(leaf(),))
        assert len(new._send_functions()) == 1
        dist_autograd._release_context(new._context_id())
        with pytest.raises(RuntimeError, match="Current thread doesn't have a valid autograd"):
            dist_autograd._current_context()
        with dist_autograd.context() as context_id:  # the thread is free for another
            assert context_id == new._context_id() + 1

    on_w0(workers, program)


def test_the_threads_of_the_engine_are_as_before_when_a_context_is_left(workers):
    def program():
        before = torch._C._is_multithreading_enabled()
        new = dist_autograd._new_context()
        assert torch._C._is_multithreading_enabled() == before
        dist_autograd._release_context(new._context_id())
        assert torch._C._is_multithreading_enabled() == before
        with torch.autograd.set_multithreading_enabled(False):
            with dist_autograd.context():
                pass
            assert not torch._C._is_multithreading_enabled()

    on_w0(workers, program)


def test_a_context_released_inside_of_its_block_is_released_once(workers):
    def program():
        with dist_autograd.context() as context_id:
            gradwire.rpc_sync("w1", nothing)
            dist_autograd._release_context(context_id)
            with pytest.raises(RuntimeError):
                dist_autograd._current_context()

    on_w0(workers, program)


def test_a_context_released_by_another_thread_is_gone_for_all(workers):
    def program():
        new = dist_autograd._new_context()._context_id()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(workers[0].run, dist_autograd._release_context, new).result(10)
        with pytest.raises(RuntimeError, match=f"with id: {new}"):
            dist_autograd._current_context()
        with pytest.raises(RuntimeError, match=f"with id: {new}"):
            dist_autograd._release_context(new)

    on_a_thread_of_w0(workers, program)


def test_init_checks_the_number_of_the_worker():
    dist_autograd._init(3)
    dist_autograd._init(4)  # no worker runs in this process yet
    for out_of_range in (-1, 65536):
        with pytest.raises(RuntimeError, match="worker_id"):
            dist_autograd._init(out_of_range)


def test_without_a_worker_every_call_says_so():
    for use in (dist_autograd._get_max_id, debug_info, dist_autograd._new_context):
        with pytest.raises(RuntimeError, match="RPC has not been initialized"):
            use()
    assert dist_autograd.is_available()


def test_leaving_a_context_forgets_it_on_every_worker_that_was_reached(workers):
    def program():
        with dist_autograd.context() as context_id:
            gradwire.rpc_sync("w1", forwarded, args=(["w2", "w3"], leaf(), leaf()))
            assert all(workers[n].run(knows, context_id) for n in range(4))
        return context_id

    context_id = on_w0(workers, program)

    assert not workers[0].run(knows, context_id)
    assert eventually(lambda: not any(workers[n].run(knows, context_id) for n in (1, 2, 3)))


# -- the recorded graph


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("how", ["sync", "remote"])
def test_the_tensors_of_a_message_leave_by_one_node_and_arrive_by_one(workers, how, sparse):
    def program():
        a, b = leaf(sparse), leaf(sparse)
        with dist_autograd.context() as context_id:
            if how == "sync":
                y = gradwire.rpc_sync("w1", added, args=(a, b))
            else:
                y = gradwire.remote("w1", added, args=(a, b)).to_here()
            here = dist_autograd._current_context()
            (message, send), (answer, recv) = (
                *here._send_functions().items(),
                *here._recv_functions().items(),
            )
            assert (message >> 48, answer >> 48) == (0, 1)
            assert send.name() == SEND
            accumulators = [node for node, _ in send.next_functions]
            assert [n for _, n in send.next_functions] == [0, 0]
            assert {node.name() for node in accumulators} == {"torch::autograd::AccumulateGrad"}
            assert accumulators[0].variable is a
            assert accumulators[1].variable is b
            assert recv.name() == RECV
            assert y.grad_fn is recv
            assert workers[1].run(graph_here, context_id) == [(["AddBackward0"], 1)]
            assert workers[1].run(made_of, context_id) == ([RECV, RECV], 1)

    on_w0(workers, program)


def test_only_tensors_that_require_grad_are_among_the_next_functions(workers):
    def program():
        tensors = [torch.full((2,), n, dtype=torch.float32) for n in range(5)]
        for tensor in tensors[::2]:
            tensor.requires_grad_()
        with dist_autograd.context():
            gradwire.rpc_sync("w1", torch.stack, args=(tensors,))
            (send,) = dist_autograd._current_context()._send_functions().values()
            assert [node.variable for node, _ in send.next_functions] == tensors[::2]

    on_w0(workers, program)


def test_the_worker_in_the_middle_forwards_from_one_node_to_another(workers):
    def program():
        with dist_autograd.context() as context_id:
            gradwire.rpc_sync("w1", forwarded, args=(["w2", "w3"], leaf(), leaf()))
            return [workers[n].run(graph_here, context_id) for n in (1, 2, 3)]

    first, second, last = on_w0(workers, program)

    assert first == second == [([RECV, RECV], 1), ([RECV], 1)]
    assert last == [(["AddBackward0"], 1)]


def test_a_call_that_comes_back_to_its_caller_has_both_ends_in_one_context(workers):
    def program():
        with dist_autograd.context() as context_id:
            y = gradwire.rpc_sync("w1", forwarded, args=(["w0"], leaf(), leaf()))
            here = dist_autograd._current_context()
            sends, recvs = here._send_functions(), here._recv_functions()
            assert [message >> 48 for message in (*sends, *recvs)] == [0, 0, 1, 1]
            assert y.grad_fn is list(recvs.values())[1]
            return graph_here(context_id)

    leaves = ["torch::autograd::AccumulateGrad"] * 2
    assert on_w0(workers, program) == [(leaves, 2), (["AddBackward0"], 1)]


def a_call_with(tensor):
    return lambda: gradwire.rpc_sync("w1", torch.sin, args=(tensor,))


def fetched(times):
    reference = gradwire.remote("w1", torch.sin, args=(leaf(),))
    for _ in range(times):
        reference.to_here()


def failed_call():
    with pytest.raises(ValueError, match="on purpose"):
        gradwire.rpc_sync("w1", failing, args=(leaf(),))


@pytest.mark.parametrize(
    ("call", "here", "there"),
    [
        (lambda: gradwire.rpc_sync("w1", nothing), (0, 0, [1]), (0, 0, [])),
        (a_call_with(torch.ones(2)), (0, 0, [1]), (0, 0, [])),
        (a_call_with(LEAF), (1, 1, [1]), (1, 1, [0])),
        (lambda: gradwire.rpc_sync("w1", own_leaf), (0, 1, [1]), (1, 0, [0])),
        (lambda: fetched(0), (1, 0, [1]), (0, 1, [])),
        (lambda: fetched(1), (1, 1, [1]), (1, 1, [0])),
        (lambda: fetched(2), (1, 2, [1]), (2, 1, [0])),
        (failed_call, (1, 0, [1]), (0, 1, [])),
    ],
)
def test_what_a_call_leaves_in_the_context_at_both_ends(workers, call, here, there):
    def program():
        with dist_autograd.context() as context_id:
            call()
            assert introspected(context_id) == here
            assert eventually(lambda: workers[1].run(introspected_or_none, context_id) == there)

    on_w0(workers, program)


def test_a_call_to_oneself_has_both_ends_here(workers):
    def program():
        with dist_autograd.context() as context_id:
            gradwire.rpc_sync("w0", added, args=(leaf(), leaf()))
            return introspected(context_id)

    assert on_w0(workers, program) == (2, 2, [0])


def test_outside_of_contexts_what_wants_a_gradient_arrives_as_a_leaf(workers):
    def program():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GraphCutWarning)
            y = gradwire.rpc_sync("w1", torch.sin, args=(leaf(),))
        assert (y.requires_grad, y.grad_fn) == (True, None)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [(y * 2).sum()])
            assert torch.equal(dist_autograd.get_gradients(context_id)[y], torch.full((2, 2), 2.0))

    on_w0(workers, program)


# -- backward


def test_a_tensor_of_a_message_that_the_loss_does_not_use_gets_no_gradient(workers):
    def program():
        a, b = leaf(), leaf()
        with dist_autograd.context() as context_id:
            first, _ = gradwire.rpc_sync("w1", two_of, args=(a, b))
            dist_autograd.backward(context_id, [first.sum()])
            gradients = dist_autograd.get_gradients(context_id)
        assert list(gradients) == [a]
        assert torch.equal(gradients[a], torch.full((2, 2), 2.0))

    on_w0(workers, program)


def test_some_of_many_results_are_enough(workers):
    def program():
        t = torch.rand(5, 2, requires_grad=True)
        with dist_autograd.context() as context_id:
            parts = gradwire.rpc_sync("w1", split_in_two, args=(t,))
            product = gradwire.rpc_sync("w2", torch.mul, args=(parts[0], parts[4]))
            dist_autograd.backward(context_id, [product.sum()])
            gradients = dist_autograd.get_gradients(context_id)
        (wanted,) = torch.autograd.grad((t[:1] * t[4:]).sum(), [t])
        assert torch.equal(gradients[t], wanted)

    on_w0(workers, program)


def test_what_is_wrong_with_the_arguments_is_said_before_anything_runs(workers):
    def program():
        with dist_autograd.context() as context_id:
            for wrong in ((context_id, None), (None, None), (context_id, LEAF), (context_id, [1])):
                with pytest.raises(TypeError, match="incompatible function arguments"):
                    dist_autograd.backward(*wrong)
            for roots, said in [
                ([], "No tensors provided for gradient computation"),
                ([torch.rand(2)], "requires_grad not set on"),
                ([LEAF], "is not a scalar, all roots need to be scalar"),
                ([torch.rand(1, requires_grad=True)], "does not have a valid gradient function"),
            ]:
                with pytest.raises(RuntimeError, match=said):
                    dist_autograd.backward(context_id, roots)

    on_w0(workers, program)


def test_an_error_in_a_backward_is_a_runtime_error_that_names_the_workers(workers):
    def program():
        with dist_autograd.context() as context_id:
            here = Boom.apply(leaf())
            y = gradwire.rpc_sync("w1", added, args=(here, leaf()))
            with pytest.raises(RuntimeError, match=r"^Error on Node 0: bwd boom"):
                dist_autograd.backward(context_id, [y.sum()])
            z = gradwire.rpc_sync("w2", with_boom, args=(leaf(), leaf()))
            with pytest.raises(RuntimeError, match=r"^Error on Node 0: Error on Node 2: bwd boom"):
                dist_autograd.backward(context_id, [z.sum()])
            y = gradwire.rpc_sync("w2", torch.sin, args=(leaf(),)).sum()
            dist_autograd.backward(context_id, [y])
            with pytest.raises(RuntimeError, match=r"Node 0: Error on Node 2: .* second time"):
                dist_autograd.backward(context_id, [y])

    on_w0(workers, program)


def test_after_failed_backwards_a_good_one_leaves_what_it_alone_would(workers):
    def program():
        a, b = leaf(), leaf()
        with dist_autograd.context() as context_id:
            y = gradwire.rpc_sync("w1", with_boom, args=(a, b)).sum()
            for _ in range(10):
                with pytest.raises(RuntimeError, match="bwd boom"):
                    dist_autograd.backward(context_id, [y], retain_graph=True)
            assert dist_autograd.get_gradients(context_id) == {}
            Boom.armed = False
            try:
                for _ in range(10):
                    dist_autograd.backward(context_id, [y], retain_graph=True)
            finally:
                Boom.armed = True
            return dist_autograd.get_gradients(context_id)[a]

    assert torch.equal(on_w0(workers, program), torch.full((2, 2), 10.0))


@pytest.mark.parametrize("sparse", [False, True])
def test_many_backwards_of_one_context_add_up(workers, sparse):
    def program():
        a, b = leaf(sparse), leaf(sparse)
        with dist_autograd.context() as context_id:
            y = gradwire.rpc_sync("w1", added, args=(a, b))
            loss = torch.sparse.sum(y) if sparse else y.sum()
            for _ in range(100):
                dist_autograd.backward(context_id, [loss], retain_graph=True)
            got = dist_autograd.get_gradients(context_id)
        assert (a.grad, b.grad, len(got)) == (None, None, 2)
        assert (got[a].is_sparse, got[a].requires_grad) == (sparse, False)
        assert torch.equal(got[b].to_dense(), torch.full((2, 2), 100.0))

    on_w0(workers, program)


def test_the_map_is_a_copy_whose_gradients_are_the_context_s_own(workers):
    def program():
        a = leaf()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [(a * 2).sum()])
            mine = dist_autograd.get_gradients(context_id)
            mine[a].zero_()
            mine.clear()
            assert torch.equal(dist_autograd.get_gradients(context_id)[a], torch.zeros(2, 2))

    on_w0(workers, program)


def test_gradients_of_own_leaves_stay_where_the_leaves_are(workers):
    def program():
        with dist_autograd.context() as context_id:
            y = gradwire.remote("w1", own_leaf).to_here()
            dist_autograd.backward(context_id, [y.sum()])
            assert dist_autograd.get_gradients(context_id) == {}
            there = workers[1].run(dist_autograd.get_gradients, context_id)
        assert list(there) == [LEAF]
        assert torch.equal(there[LEAF], torch.ones(2))

    on_w0(workers, program)


def test_a_value_that_is_made_outside_of_the_context_is_fetched_inside_of_it(workers):
    GATES["fetch"] = threading.Event()

    def program():
        reference = gradwire.remote("w1", slow_leaf, args=("fetch",))
        with dist_autograd.context() as context_id, ThreadPoolExecutor(1) as pool:
            pool.submit(GATES["fetch"].set)
            dist_autograd.backward(context_id, [(reference.to_here() * 3).sum()])
            return gradwire.rpc_sync("w1", gradient_of_reference, args=(context_id, reference))

    assert torch.equal(on_w0(workers, program), torch.full((2,), 3.0))


def test_debug_info_counts_contexts_and_the_passes_that_run(workers):
    seen = []

    class Looks(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            seen.append(debug_info())
            return gradient

    def program():
        with dist_autograd.context() as context_id:
            y = Looks.apply(gradwire.rpc_sync("w1", torch.sin, args=(leaf(),)))
            z = gradwire.rpc_sync("w2", torch.sin, args=(y,))
            dist_autograd.backward(context_id, [z.sum()])
            return debug_info()

    one = {"num_current_backward_passes": 1, "num_autograd_contexts": 1}
    assert on_w0(workers, program) == one | {"num_current_backward_passes": 0}
    assert seen == [one]
    none = {"num_current_backward_passes": 0, "num_autograd_contexts": 0}
    assert eventually(lambda: all(worker.run(debug_info) == none for worker in workers))


def test_many_threads_of_many_workers_lean_on_one(workers):
    right = []

    def program():
        a, b = (torch.rand(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        with dist_autograd.context() as context_id:
            c = gradwire.rpc_sync("w0", torch.add, args=(a, b))
            d = gradwire.rpc_sync("w0", torch.mul, args=(b, c))
            e = gradwire.rpc_sync("w0", torch.matmul, args=(c, d))
            f = gradwire.rpc_sync("w0", torch.add, args=(d, e))
            dist_autograd.backward(context_id, [f.sum()])
            got = dist_autograd.get_gradients(context_id)
        product = b * (a + b)
        wanted = torch.autograd.grad((product + (a + b) @ product).sum(), [a, b])
        right.append(torch.allclose(got[a], wanted[0]) and torch.allclose(got[b], wanted[1]))

    with ThreadPoolExecutor(30) as pool:
        for future in [pool.submit(workers[1 + n % 3].run, program) for n in range(30)]:
            future.result(60)

    assert right == [True] * 30


def test_a_context_released_in_the_middle_of_a_backward_ends_it_with_an_error(workers):
    class Releases(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            dist_autograd._release_context(dist_autograd._current_context()._context_id())
            return gradient

    def program():
        new = dist_autograd._new_context()._context_id()
        y = leaf()
        for n in range(9):
            y = gradwire.rpc_sync(f"w{1 + n % 3}", torch.sin, args=(y,))
        with pytest.raises(RuntimeError, match="closed"):
            dist_autograd.backward(new, [Releases.apply(y).sum()])
        with pytest.raises(RuntimeError, match="Could not find"):
            dist_autograd.get_gradients(new)

    on_a_thread_of_w0(workers, program)


# -- hooks and buffers


def test_the_hooks_of_leaves_and_nodes_run_and_change_the_gradient(workers):
    def program():
        called = []
        t = torch.rand(2, 2, requires_grad=True)
        t.register_hook(lambda gradient: gradient * 2)
        both = t + t
        accumulator = both.grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda outputs, inputs: called.append((outputs, len(inputs))))
        accumulator.register_hook(lambda outputs, inputs: called.append("again"))
        with dist_autograd.context() as context_id:
            y = gradwire.rpc_sync("w1", torch.mul, args=(both, torch.ones(2, 2)))
            y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
            dist_autograd.backward(context_id, [y.sum()])
            gradients = dist_autograd.get_gradients(context_id)
        assert called == [((), 1), "again"]
        assert list(gradients) == [t]
        assert torch.equal(gradients[t], torch.full((2, 2), 12.0))

    on_w0(workers, program)


class PassesOn(Function):
    """Gives what it was given, and remembers where that lay."""

    seen = 0

    @staticmethod
    def forward(ctx, *tensors):
        ctx.count = len(tensors)
        return sum(tensors[1:], tensors[0] * 1)

    @staticmethod
    def backward(ctx, gradient):
        PassesOn.seen = buffer(gradient)
        return (gradient,) * ctx.count


class Expands(Function):
    """Gives a gradient that is not dense."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.new_ones(1)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(1).expand(ctx.shape)


def buffer(tensor):
    return (tensor._values() if tensor.is_sparse else tensor).data_ptr()


def gradients_of(*leaves, loss):
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss], retain_graph=True)
        gradients = dist_autograd.get_gradients(context_id)
        return [gradients[leaf] for leaf in leaves]


def test_a_gradient_that_nobody_else_has_is_kept_without_a_copy(workers):
    def program():
        a = leaf()
        (got,) = gradients_of(a, loss=PassesOn.apply(a)[1][0])
        assert buffer(got) == PassesOn.seen
        (got,) = gradients_of(a, loss=Expands.apply(PassesOn.apply(a)))
        assert buffer(got) != PassesOn.seen

    on_w0(workers, program)


def test_a_gradient_given_to_two_leaves_is_copied_for_both(workers):
    def program():
        a, b = leaf(), leaf()
        for loss in (PassesOn.apply(a, b)[1][0], Expands.apply(PassesOn.apply(a, b))):
            for_a, for_b = gradients_of(a, b, loss=loss)
            assert len({buffer(for_a), buffer(for_b), PassesOn.seen}) == 3

    on_w0(workers, program)


def test_a_sparse_gradient_is_kept_without_a_copy_and_added_to(workers):
    def program():
        a = torch.randn(10, 3, requires_grad=True)
        indices, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4])
        loss = embedding_bag(indices, PassesOn.apply(a), offsets, sparse=True).sum()
        (got,) = gradients_of(a, loss=loss)
        assert got.is_sparse
        assert buffer(got) == PassesOn.seen
        with dist_autograd.context() as context_id:
            for _ in range(5):
                dist_autograd.backward(context_id, [loss], retain_graph=True)
            total = dist_autograd.get_gradients(context_id)[a]
        assert torch.allclose(total.to_dense(), got.to_dense() * 5)

    on_w0(workers, program)


# -- profiles


def test_a_profile_shows_the_backward_and_its_crossings_by_torch_s_names(workers):
    def program():
        with dist_autograd.context() as context_id:
            y = gradwire.rpc_sync("w1", added, args=(leaf(), leaf())).sum()
            with profile() as profiled:
                dist_autograd.backward(context_id, [y])
        return [event.name for event in profiled.function_events]

    names = on_w0(workers, program)

    assert [names.count(name) for name in (SEND, RECV)] == [1, 1]
    assert names.count("torch::distributed::autograd::backward") == 1
