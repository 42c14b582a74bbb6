"""Ordinary values without the walk: the same bytes, the same values; and nothing else."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import BadMessage, OverLimit
from gradwire.options import Limits
from gradwire.rpc.codec.codec import Codec, Undecoded
from gradwire.rpc.expose.registry import Registry

CODEC = Codec(Registry(), Limits())
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


def shown(value):
    """A value to compare: tensors by identity, numbers by type."""
    if isinstance(value, tuple | list):
        return type(value), [shown(item) for item in value]
    return type(value), id(value) if isinstance(value, torch.Tensor) else value


@settings(derandomize=True, deadline=None)
@given(ordinary | rows | calls)
def test_what_is_ordinary_makes_the_bytes_of_the_walk_and_comes_back(value):
    data, tensors, _ = CODEC.encode(value)
    flat = CODEC.maybe_encode(value)
    assert flat is not None
    assert flat[0] == data
    assert shown(flat[1]) == shown(tensors)
    assert shown(CODEC.maybe_decode(data, tensors)) == shown(value)


@settings(derandomize=True, deadline=None)
@given(other | st.tuples(ordinary, other) | st.tuples(rows, other) | st.tuples(rows, rows, other))
def test_whatever_else_is_packed_alike_or_left_to_the_walk(value):
    data, tensors, _ = CODEC.encode(value)
    flat = CODEC.maybe_encode(value)
    assert flat is None or (flat[0] == data and shown(flat[1]) == shown(tensors))
    came = CODEC.maybe_decode(data, tensors)
    assert isinstance(came, Undecoded) or shown(came) == shown(value)


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
    data, tensors = msgspec.msgpack.encode(skeleton), [torch.ones(1)] * count
    value = CODEC.maybe_decode(data, tensors)
    if not isinstance(value, Undecoded):
        assert shown(CODEC.decode_node(Undecoded(skeleton), tensors)) == shown(value)


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
    assert isinstance(CODEC.maybe_decode(data, tensors), Undecoded)
    with pytest.raises(BadMessage):
        CODEC.decode(data, tensors)


def test_limits_are_for_the_walk_to_judge():
    short = Codec(Registry(), Limits(elements=8))
    shallow = Codec(Registry(), Limits(depth=1))
    narrow = Codec(Registry(), Limits(head=8))
    many, call = ((1,) * 20, {}), ((1,), {})
    data = CODEC.encode(many).data
    assert short.maybe_encode(many) is None
    assert narrow.maybe_encode(many) is None
    assert shallow.maybe_encode(call) is None
    assert isinstance(shallow.maybe_decode(data, ()), Undecoded)
    with pytest.raises(OverLimit, match="more than 8 values"):
        short.maybe_decode(data, ())
