"""How much a peer may send, open and hold: each limit is an option, and says so when it is met."""

from __future__ import annotations

import gc
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire.agent.messages import Done
from gradwire.agent.serving.dispatch import Dispatch, Lane, Source
from gradwire.agent.serving.peer_limits import EACH, PeerLimit
from gradwire.autograd.graph.crossing import check_crossing
from gradwire.autograd.graph.lineage import one, to_wire
from gradwire.autograd.messages import Crossing
from gradwire.errors import BadMessage, NotSerializable, OverLimit, PeerLost, UsageError
from gradwire.events import Events
from gradwire.ids import EdgeId
from gradwire.options import Limits, Options
from gradwire.rpc.codec.codec import Codec
from gradwire.rpc.expose.registry import Registry
from gradwire.rpc.messages import Body, Call
from gradwire.testing import cluster
from gradwire.transport.memory import MemoryNetwork
from gradwire.wire.message import (
    Frame,
    Kinds,
    check_arrived,
    decode_prefix,
    encode,
    encode_prefix,
    has_more_than,
    kind_of,
)
from gradwire.wire.tensor import TensorHeader, decode_tensors, encode_tensors
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
FLOODED = Options(threads=1, limits=Limits(unserved=20 * EACH, in_flight=10 * EACH))


def echo(x):
    return x


def double(x):
    return 2 * x


def limited(n: int = 2, **limits: int):
    return cluster(n, expose=[HERE], options=Options(limits=Limits(**limits)))


# --- how many values ------------------------------------------------------------------------------

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text()
    | st.binary() | st.binary(min_size=250, max_size=70_000) | st.text(min_size=30, max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=60,
)  # fmt: skip


def count(value: object) -> int:
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + sum(1 + count(item) for item in value.values())
    return 1


@given(plain)
def test_values_are_counted_without_decoding_them(value):
    data = msgspec.msgpack.encode(value)
    assert not has_more_than(data, count(value))
    assert has_more_than(data, count(value) - 1)


@given(st.binary(max_size=200), st.integers(0, 50))
def test_any_bytes_are_counted(data, most):
    assert has_more_than(data, most) in (True, False)


def test_every_kind_of_msgpack_value_is_stepped_over():
    for data in (msgspec.msgpack.Ext(5, b"x" * n) for n in (1, 2, 4, 8, 16, 3, 300, 70_000)):
        packed = msgspec.msgpack.encode([data, 1])
        assert not has_more_than(packed, 3)
        assert has_more_than(packed, 2)
    for size in (16, 70_000):
        assert not has_more_than(msgspec.msgpack.encode([None] * size), size + 1)
        assert has_more_than(msgspec.msgpack.encode([None] * size), size)
        assert not has_more_than(msgspec.msgpack.encode(dict.fromkeys(range(size))), 2 * size + 1)


def test_many_tiny_values_are_refused_before_they_are_made():
    codec = Codec(Registry(), Limits())
    bomb = b"\xdd" + (1 << 26).to_bytes(4, "big") + b"\x90" * (1 << 23)
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage, match="a message holds more than 1048576 values"):
            codec.decode(bomb, ())
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_many_headers_are_refused_before_they_are_made():
    body = Body(b"", [TensorHeader(0, ())] * 100, [], [])
    head = encode(Call("f", body, None, True, False, 1.0))
    kinds = Kinds([Call], elements=300)
    with pytest.raises(BadMessage, match="a message holds more than 300 values"):
        kinds.decode(kind_of(Call), head)
    assert Kinds([Call], elements=1300).decode(kind_of(Call), head).body == body


def test_too_many_values_do_not_leave():
    with limited(elements=100) as workers:
        many = list(range(98))  # beside them stand the argument list and the keywords
        assert workers[0].run(gradwire.rpc_sync, "w1", echo, ([7] * 80,)) == [7] * 80
        with pytest.raises(NotSerializable, match="more than 100 numbers, texts and containers"):
            workers[0].run(gradwire.rpc_sync, "w1", echo, (many,))
        assert workers[0].run(gradwire.rpc_sync, "w1", echo, ("x" * 1000,)) == "x" * 1000


# --- tensors --------------------------------------------------------------------------------------


def test_the_number_of_tensors_is_an_option_on_both_ends():
    few = Limits(tensors=2)
    with pytest.raises(NotSerializable, match="3 tensors in one message are over the limit of 2"):
        encode_tensors([torch.ones(1)] * 3, few)
    headers, _ = encode_tensors([torch.ones(0)] * 3)
    with pytest.raises(BadMessage, match="3 tensors are over the limit of 2"):
        decode_tensors(headers, None, few)


def test_the_number_of_dimensions_is_an_option():
    headers, _ = encode_tensors([torch.ones(0, 1, 1)])
    assert decode_tensors(headers, None, Limits(dimensions=3))[0].shape == (0, 1, 1)
    with pytest.raises(BadMessage, match="a tensor has more than 2 dimensions"):
        decode_tensors(headers, None, Limits(dimensions=2))


@pytest.mark.parametrize(
    "shape",
    [(1 << 62, 4), (1 << 32, 1 << 32), (1 << 62,), (0, 1 << 62, 4), (-1, -1), (1 << 63,)],
)
@pytest.mark.parametrize("device", ["", "meta"])
def test_a_shape_whose_bytes_overflow_is_refused(shape, device):
    with pytest.raises(BadMessage):
        decode_tensors([TensorHeader(11, shape, device=device)], None)


# --- durations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf")])
def test_a_duration_that_is_no_number_is_refused(seconds):
    head = encode(Call("f", Body(b"", [], [], []), None, True, False, seconds))
    with pytest.raises(BadMessage, match="Expected `float`"):
        Kinds([Call]).decode(kind_of(Call), head)


# --- edges ----------------------------------------------------------------------------------------

GOOD = Crossing(EdgeId(1, 0), 1, to_wire(one(EdgeId(1, 0))), [0])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"edge": EdgeId(2, 0)}, "e2.0 is no edge of w1"),
        ({"edge": EdgeId(1, -1)}, "is no edge of w1"),
        ({"edge": EdgeId(1, 1 << 48)}, "is no edge of w1"),
        ({"depth": 0}, "is 0 deep"),
        ({"depth": -1}, "is -1 deep"),
        ({"depth": 1 << 62}, "deep, the limit is 800"),
        ({"lineage": dict.fromkeys(range(801), b"\1")}, "on more edges than there may be"),
        ({"tensors": []}, "has no tensors"),
        ({"tensors": [0, 0]}, "or one of them twice"),
        ({"tensors": [3]}, "names a tensor that its message does not have"),
        ({"tensors": [-1]}, "names a tensor that its message does not have"),
        ({"tensors": [1]}, "names a tensor that has no gradient"),
        ({"tensors": [2]}, "or another edge already"),
    ],
)
def test_a_crossing_is_checked_before_a_node_is_made(change, why):
    tensors = [torch.ones(1), torch.ones(1, dtype=torch.int64), torch.ones(1, requires_grad=True)]
    check_crossing(GOOD, 1, tensors, 100)
    with pytest.raises(BadMessage, match=why):
        check_crossing(msgspec.structs.replace(GOOD, **change), 1, tensors, 100)


def crossing_there_and_back(times: int):
    x = torch.ones(1, requires_grad=True)
    for _ in range(times):
        x = gradwire.rpc_sync("w1", double, (x,))
    return x


def test_live_edges_of_one_peer_are_limited_and_counted_down_when_they_are_released():
    with limited(edges=5) as workers:
        alive = workers[1].worker.engine.edges.came_from(0).alive
        for _ in range(3):
            kept = workers[0].run(crossing_there_and_back, 5)
            assert len(alive) == 5
            del kept
            assert eventually(lambda: not alive)
        for _ in range(20):  # more than the limit, but few at once
            workers[0].run(crossing_there_and_back, 1)
            assert eventually(lambda: not alive)
        with pytest.raises(BadMessage, match="5 edges open here already") as refused:
            workers[0].run(crossing_there_and_back, 6)
        assert "Limits(edges=…)" in str(refused.value)
        del refused
        assert_nothing_left(workers)
        assert not alive


def passes_one_after_the_other(times: int):
    x = torch.ones(1, requires_grad=True)
    y = gradwire.rpc_sync("w1", double, (x,))
    for _ in range(times):
        y.backward(retain_graph=True)
    return x.grad.item()


def passes_one_inside_the_other(times: int):
    x = torch.ones(1, requires_grad=True)

    def another(_):
        nonlocal times
        times -= 1
        if times:
            begin()

    @torch.enable_grad()
    def begin():
        start = x * 1
        start.register_hook(another)
        gradwire.rpc_sync("w1", double, (start,)).backward()

    begin()
    return x.grad.item()


def test_passes_of_one_peer_are_limited_where_they_are_heard_of():
    with limited(passes=3) as workers:
        passes = workers[1].worker.engine.passes
        assert workers[0].run(passes_one_after_the_other, 12) == 24
        assert workers[0].run(passes_one_inside_the_other, 3) == 6
        with pytest.raises(OverLimit, match="3 backward passes of w0 are known here") as refused:
            workers[0].run(passes_one_inside_the_other, 4)
        assert "Limits(passes=…)" in str(refused.value)
        with pytest.raises(UsageError, match="w1 did not confirm"):  # which is said once
            workers[0].run(passes_one_inside_the_other, 3)
        assert workers[0].run(passes_one_inside_the_other, 3) == 6
        del refused
        assert_nothing_left(workers)
        assert len(passes) == 0


# --- contexts, references, connections ------------------------------------------------------------


def call_in_a_context(everyone_called: threading.Barrier):
    with gradwire.context():
        try:
            return gradwire.rpc_sync("w1", echo, (1,))
        except BadMessage as error:
            return error.message
        finally:
            everyone_called.wait(30)


def call_in_contexts(member, count: int) -> list:
    """What calls in so many contexts, all open at once, bring."""
    barrier = threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        calls = [pool.submit(member.run, call_in_a_context, barrier) for _ in range(count)]
        return [call.result() for call in calls]


def test_contexts_of_one_peer_are_limited():
    with limited(contexts=3) as workers:
        contexts = workers[1].worker.engine.contexts
        for _ in range(2):
            assert call_in_contexts(workers[0], 3) == [1, 1, 1]
            assert eventually(lambda: not len(contexts))
        came = call_in_contexts(workers[0], 4)
        assert came.count(1) == 3
        assert "a peer has 3 contexts open here already, which is the limit" in came


def test_a_context_counts_as_its_senders_not_its_claimed_openers():
    with limited(contexts=2) as workers:
        contexts = workers[1].worker.engine.contexts
        for claimed in (5, 6):
            contexts.heard_of(claimed << 48, 0)
        with pytest.raises(BadMessage, match="2 contexts open here already"):
            contexts.heard_of(7 << 48, 0)


def hold(count: int):
    return [gradwire.remote("w1", echo, (n,)).to_here() and None for n in range(count)]


def hold_all(count: int):
    references = [gradwire.remote("w1", echo, (n,)) for n in range(count)]
    return [reference.to_here() for reference in references]


def test_references_of_one_peer_are_limited():
    with limited(references=4) as workers:
        assert workers[0].run(hold_all, 4) == [0, 1, 2, 3]
        gc.collect()
        assert eventually(lambda: not workers[1].worker.refs.statistics().owned)
        with pytest.raises(gradwire.GradwireError):
            workers[0].run(hold_all, 6)
        gc.collect()
        assert eventually(lambda: not workers[1].worker.refs.statistics().owned)
        workers[0].run(hold, 4)


def test_each_use_of_a_reference_that_was_refused_says_why():
    def uses():
        kept = [gradwire.remote("w1", echo, (n,)) for n in range(4)]
        assert [reference.to_here() for reference in kept] == [0, 1, 2, 3]
        refused = gradwire.remote("w1", echo, (4,))
        for use in (
            refused.to_here,
            lambda: gradwire.rpc_sync("w1", echo, (refused,)),
            lambda: refused.rpc_sync().__add__(1),
            refused.to_here,
        ):
            with pytest.raises(OverLimit, match="a peer has 4 references open here already"):
                use()

    with limited(references=4) as workers:
        workers[0].run(uses)
        assert_nothing_left(workers)
        assert workers[0].worker.refs._refused == {}


def test_a_quota_is_taken_and_given_back_by_peer():
    quota = PeerLimit("apples", 2)
    quota.take(1)
    quota.take(1)
    quota.take(2, 2)
    with pytest.raises(BadMessage, match=r"2 apples open here already(.|\n)*Limits\(apples=…\)"):
        quota.take(1)
    quota.give_back(1)
    quota.take(1)
    assert (quota.taken(1), quota.taken(2), quota.taken(3)) == (2, 2, 0)


# --- what waits to be served ----------------------------------------------------------------------


def queue_in(dispatch: Dispatch, peer: int, frame: Frame) -> None:
    dispatch.serve(Source(peer, None, 0), frame, may_run=False)


def reraise(_, error):
    raise error


@pytest.fixture
def dispatch():
    """Serves one call at a time, and lets three empty ones wait."""
    options = Options(threads=1, limits=Limits(unserved=3 * EACH + 100))
    made = Dispatch(Kinds([], 1000), "test", options, reraise, Events(time.monotonic))
    yield made
    made.close(10)


def test_a_peer_that_sends_more_than_may_wait_is_cut_off(dispatch, gate):
    ran = []
    dispatch.handle(Done, lambda *_: (GATES[gate].wait(10), ran.append(1)), Lane.USER)
    frame = Frame(kind_of(Done), 0, 0, encode(Done()), ())
    for _ in range(3):
        queue_in(dispatch, 1, frame)
    with pytest.raises(BadMessage, match=r"\d+ bytes of messages wait(.|\n)*Limits\(unserved=…\)"):
        queue_in(dispatch, 1, frame)
    queue_in(dispatch, 2, frame)
    GATES[gate].set()
    assert eventually(lambda: len(ran) == 4 and not dispatch._unserved.taken(1))
    queue_in(dispatch, 1, frame)


def test_a_handler_that_fails_waits_no_longer(dispatch, caplog):
    def fail(*_):
        raise ValueError

    dispatch.handle(Done, fail, Lane.USER)
    queue_in(dispatch, 1, Frame(kind_of(Done), 0, 0, encode(Done()), ()))
    assert eventually(lambda: not dispatch._unserved.taken(1) and "a job failed" in caplog.text)


def test_what_is_larger_than_the_limit_may_be_there_alone():
    limit = PeerLimit("bytes", 10, one_may_exceed=True)
    assert limit.maybe_take(1, 100)
    assert not limit.maybe_take(1, 1)
    limit.give_back(1, 100)
    assert limit.maybe_take(1, 5)
    assert not limit.maybe_take(1, 100)


def wait_for(gate):
    GATES[gate].wait(10)


def test_a_flood_of_requests_ends_the_connection(gate):
    with cluster(2, expose=[HERE], options=FLOODED) as workers:
        agent = workers[0].worker.agent
        agent.window = PeerLimit("in_flight", 1 << 40)  # a peer that does not wait
        waiting = [workers[0].run(gradwire.rpc_async, "w1", wait_for, (gate,)) for _ in range(40)]
        with pytest.raises(PeerLost, match="w1 was lost before answering"):
            waiting[-1].wait()
        GATES[gate].set()


def test_a_correct_peer_waits_instead(gate):
    with cluster(2, expose=[HERE], options=FLOODED) as workers:
        GATES[gate].set()
        waiting = [workers[0].run(gradwire.rpc_async, "w1", wait_for, (gate,)) for _ in range(40)]
        assert [one.wait() for one in waiting] == [None] * 40


@pytest.mark.parametrize("field", list(Limits.__slots__))
def test_every_limit_is_a_positive_number(field):
    with pytest.raises(gradwire.UsageError, match=f"limit {field}=0 is not a positive number"):
        Limits(**{field: 0})


def test_what_is_large_is_checked_once(monkeypatch):
    seen = []
    monkeypatch.setattr("gradwire.wire.message.has_more_than", lambda *_: seen.append(1))
    check_arrived(b"\xc0" * 10, 10)
    assert not seen
    check_arrived(b"\xc0" * 11, 10)
    assert seen


def test_connections_of_one_peer_are_limited():
    with limited(connections=2) as workers:
        assert workers[0].run(gradwire.rpc_sync, "w1", echo, (1,)) == 1
        connections = workers[0].worker.agent._connections
        connections._use(1, MemoryNetwork().pair()[0])
        with pytest.raises(OverLimit, match=r"w1 has 2 connections(.|\n)*Limits\(connections=…\)"):
            connections._use(1, MemoryNetwork().pair()[0])
        assert workers[0].run(gradwire.rpc_sync, "w1", echo, (1,)) == 1


FRAME = encode_prefix(Frame(1, 0, 0, b"head", [b"payload"]))
ENCODED = Codec(Registry(), Limits()).encode([[1, 2, 3]]).data
TOO_MUCH = {
    "head": lambda limits: decode_prefix(FRAME, limits),
    "payload": lambda limits: decode_prefix(FRAME, limits),
    "tensors": lambda limits: decode_tensors([TensorHeader(6, ())] * 2, None, limits),
    "dimensions": lambda limits: decode_tensors([TensorHeader(6, (1, 1))], None, limits),
    "depth": lambda limits: Codec(Registry(), limits).decode(ENCODED, []),
    "elements": lambda limits: Codec(Registry(), limits).decode(ENCODED, []),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_an_error_over_a_limit_names_the_limit_and_how_to_raise_it(name):
    with pytest.raises(OverLimit) as caught:
        TOO_MUCH[name](Limits(**{name: 1}))

    assert f"raise Limits({name}=…)" in caught.value.hint


@pytest.mark.parametrize("name", ["head", "depth", "elements"])
def test_a_refusal_to_send_too_much_names_the_limit_and_how_to_raise_it(name):
    with pytest.raises(NotSerializable) as caught:
        Codec(Registry(), Limits(**{name: 1})).encode([[1, 2, 3]])

    assert f"raise Limits({name}=…)" in caught.value.hint
