"""Ordinary values without the walk: the same bytes, the same values; and nothing else."""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import BadMessage, NotSerializable, OverLimit
from gradwire.options import Limits
from gradwire.rpc.behavior import NATIVE
from gradwire.rpc.codec.body import WALK, BodyCodec, maybe_node, maybe_value
from gradwire.rpc.codec.codec import Codec
from gradwire.rpc.expose.registry import Registry
from gradwire.rpc.messages import Body

CODEC = Codec(Registry(), Limits())
NO_REFS = SimpleNamespace(
    local=threading.local(), unpacking=lambda came, source: nullcontext(), pack_undone=list
)
ONE, TWO = torch.ones(1), torch.nn.Parameter(torch.ones(2))

ordinary = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="ascii"), max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from([ONE, TWO])
)
other = st.sampled_from([[], (), {}, {"a": 1}, 1 << 64, "é", "\ud800", 1j, [ONE], (TWO,), {1: ONE}])
rows = st.lists(ordinary, max_size=4).map(tuple)
calls = st.tuples(rows, st.just({}))


def bodies_within(limits):
    engine = SimpleNamespace(
        events=SimpleNamespace(record=None),
        limits=limits,
        devices=None,
        releases=SimpleNamespace(riding_to=lambda _: []),
    )
    return BodyCodec(Codec(Registry(), limits), engine, NO_REFS, NATIVE)


def shown(value):
    """A value to compare: tensors by identity, numbers by type."""
    if isinstance(value, tuple | list):
        return type(value), [shown(item) for item in value]
    return type(value), id(value) if isinstance(value, torch.Tensor) else value


@settings(derandomize=True, deadline=None)
@given(ordinary | rows | calls)
def test_what_is_ordinary_makes_the_bytes_of_the_walk_and_comes_back(value):
    data, tensors, _ = CODEC.encode(value)
    found = []
    node = maybe_node(value, found)
    if node is WALK:
        assert len(tensors) < len(found), "only a tensor that is there twice needs a walk"
        return
    assert msgspec.msgpack.encode(node) == data
    assert shown(found) == shown(tensors)
    assert shown(maybe_value(msgspec.msgpack.decode(data), tensors)) == shown(value)


@settings(derandomize=True, deadline=None)
@given(other | st.tuples(ordinary, other) | st.tuples(rows, other) | st.tuples(rows, rows, other))
def test_whatever_else_is_packed_alike_or_left_to_the_walk(value):
    data, tensors, _ = CODEC.encode(value)
    found = []
    node = maybe_node(value, found)
    if node is not WALK:
        assert msgspec.msgpack.encode(node) == data
        assert shown(found) == shown(tensors)
    came = maybe_value(msgspec.msgpack.decode(data), tensors)
    assert came is WALK or shown(came) == shown(value)


odd_tags = st.sampled_from([0, 1, 2, 5, True, False, 5.0, 2.0, 1.0, -1, None, "1"])
skeletons = st.recursive(
    ordinary.filter(lambda value: not isinstance(value, torch.Tensor)) | odd_tags,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(lambda tag, rest: [tag, *rest], odd_tags, st.lists(inner, max_size=3))
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(derandomize=True, deadline=None, max_examples=500)
@given(skeletons, st.integers(0, 2))
def test_no_skeleton_passes_that_the_walk_would_refuse(skeleton, count):
    tensors = [torch.ones(1)] * count
    value = maybe_value(msgspec.msgpack.decode(msgspec.msgpack.encode(skeleton)), tensors)
    if value is not WALK:
        assert shown(CODEC.decode_node(skeleton, tensors)) == shown(value)


@pytest.mark.parametrize(
    ("skeleton", "count"),
    [
        ([5, 0], 0),
        ([5, 0], 2),
        ([5, 1], 1),
        ([5.0, 0], 1),
        ([True, [5, 0]], 1),
        ([1, [5, 0], [5, 0]], 1),
        ([1, [5, 1], [5, 0]], 2),
        ([1, [1, 1], [2.0]], 0),
        ([1, [True, 1], [2]], 0),
        (None, 1),
        ({}, 0),
        ([], 0),
    ],
)
def test_what_does_not_fit_is_refused_by_the_walk(skeleton, count):
    data, tensors = msgspec.msgpack.encode(skeleton), [torch.ones(1)] * count
    assert maybe_value(msgspec.msgpack.decode(data), tensors) is WALK
    with pytest.raises(BadMessage):
        CODEC.decode(data, tensors)


@pytest.mark.parametrize(
    ("limits", "value"),
    [
        (Limits(elements=8), ((1,) * 20, {})),
        (Limits(head=8), ((1,) * 20, {})),
        (Limits(depth=1), ((1,), {})),
    ],
)
def test_limits_are_for_the_walk_to_judge(limits, value):
    codec, bodies = Codec(Registry(), limits), bodies_within(limits)
    data = CODEC.encode(value).data

    with pytest.raises(NotSerializable) as alone:
        codec.encode(value, ("args", "kwargs"))
    with pytest.raises(NotSerializable) as encoded:
        bodies.encode(value, to=1, context=None, place=("args", "kwargs"), deadline=math.inf)
    assert str(encoded.value) == str(alone.value)
    if limits.head > len(data):
        with pytest.raises(OverLimit):
            bodies.decode(Body(data, [], [], []), None, source=1, context=None)


ARGUMENTS = ("args", "kwargs")
common = [(None, "result"), (ONE, "result"), (((ONE,), {}), "result")]
common += [((tuple(torch.ones(1) for _ in range(n)), {}), ARGUMENTS) for n in range(5)]
common += [(((ONE,) * n, {}), ARGUMENTS) for n in (2, 5)]
others = [((), "result"), ((ONE,), "result")]
others += [((args, {}), ARGUMENTS) for args in [(None,), (ONE, 1), ((),)]]
others += [(((ONE,), {"a": 1}), ARGUMENTS)]


@pytest.mark.parametrize(
    ("value", "place"),
    [*common, *others],
)
def test_the_bodies_of_common_values_are_those_of_the_walk(value, place):
    bodies, data = bodies_within(Limits()), CODEC.encode(value).data

    encoded = bodies.encode(value, to=1, context=None, place=place, deadline=math.inf)
    assert encoded.body.data == data
    payload = memoryview(bytearray().join(map(bytes, encoded.payload)))
    came = bodies.decode(encoded.body, payload, source=1, context=None).value
    assert repr(came) == repr(value)


@pytest.mark.parametrize(("value", "place"), common)
def test_the_data_of_a_common_value_is_refused_with_other_tensors(value, place):
    bodies = bodies_within(Limits())
    body = bodies.encode(value, to=1, context=None, place=place, deadline=math.inf).body
    more = bodies.encode(torch.ones(0), to=1, context=None, place="result", deadline=math.inf)
    wrong = [[*more.body.tensors] * n for n in range(6) if n != len(body.tensors)]

    for tensors in wrong:
        with pytest.raises(BadMessage):
            bodies.decode(Body(body.data, tensors, [], []), None, source=1, context=None)
