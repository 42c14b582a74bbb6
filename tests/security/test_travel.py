"""What may travel: data, and what the user says how; a refusal names the ways out."""

from __future__ import annotations

import enum
import math
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import gradwire
from gradwire.errors import ArgumentTypeError, BadMessage, NotExposed, NotSerializable
from gradwire.options import Options
from gradwire.rpc.codec import named_types
from gradwire.testing import cluster
from tests.process_cluster import process_cluster
from tests.security import exotic
from tests.security.exotic import Bomb, Box, Fallback, Money

HERE = sys.modules[__name__]
Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Config:
    name: str
    sizes: tuple[int, ...]
    weight: object = None


SPARSE = torch.sparse_coo_tensor([[0, 2], [1, 0]], [1.0, 2.0], (3, 2), check_invariants=True)

DATA = [
    None, True, 7, -(1 << 63), 1 << 64, -(1 << 200), 1.5, math.inf, 1 + 2j, "text", "\ud800",
    b"bytes", bytearray(b"more"), [1, [2]], (1, (2,)), {"a": 1, 2: "b", (3,): None}, {1, 2},
    frozenset({"x"}), OrderedDict(a=1), slice(1, None, 2), range(2, 9, 3), ..., torch.float16,
    torch.device("meta"), torch.Size([2, 3]), torch.strided, Colour.RED, Point(1, [2]),
    Config("c", (1, 2)), np.float32(1.5), np.str_("s"), np.datetime64("2020-01-01"), Money(5),
]  # fmt: skip

TENSORS = [
    torch.arange(6).reshape(2, 3), torch.ones(3, 0), torch.tensor(1 + 2j),
    torch.ones(2, 2, dtype=torch.bfloat16), SPARSE, SPARSE.coalesce(),
]  # fmt: skip


@pytest.fixture(scope="module")
def workers():
    with cluster(2, expose=[HERE, exotic]) as made:
        yield made


def send(workers, value):
    return workers[0].run(gradwire.rpc_sync, "w1", exotic.echo, (value,))


@pytest.mark.parametrize("value", DATA, ids=lambda value: f"{type(value).__name__} {value!r:.20}")
def test_data_arrives_equal_and_of_its_type(workers, value):
    came = send(workers, value)
    assert type(came) is type(value)
    assert came == value


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype} {t.layout} {list(t.shape)}")
def test_tensors_arrive(workers, tensor):
    came = send(workers, tensor)
    assert (came.dtype, came.layout, came.shape) == (tensor.dtype, tensor.layout, tensor.shape)
    assert torch.equal(came.to_dense(), tensor.to_dense())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_compressed_tensor_arrives(workers):
    tensor = torch.eye(3).to_sparse_csr()
    came = send(workers, tensor)
    assert came.layout is torch.sparse_csr
    assert torch.equal(came.to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3), np.array(1.0), np.zeros((0, 2), "f4"), np.array([True]),
        np.array(["a", "bc"]), np.array([b"x"]), np.array([1j], "c8"), np.arange(4, dtype=">i2"),
        np.array(["2020"], "M8[Y]"), np.asfortranarray(np.ones((2, 3))),
    ],
    ids=lambda array: str(array.dtype),
)  # fmt: skip
def test_arrays_arrive(workers, array):
    came = send(workers, array)
    assert (came.dtype, came.shape) == (array.dtype, array.shape)
    assert np.array_equal(came, array)


def test_a_reference_arrives_as_one(workers):
    def program():
        mine = gradwire.RRef(torch.ones(2))
        return gradwire.rpc_sync("w1", exotic.echo, (mine,)).local_value()

    assert torch.equal(workers[0].run(program), torch.ones(2))


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_is_refused_with_a_way_out(workers):
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(NotSerializable, match=r"quantized|qint8") as refused:
        send(workers, tensor)
    assert refused.value.hint


# --- what does not --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "place"),
    [
        ((1, {"cfg": Fallback()}), {}, 'args[1]["cfg"]'),
        ((Fallback(),), {}, "args[0]"),
        ((), {"x": [0, (Fallback(),)]}, 'kwargs["x"][1][0]'),
        (({"a": {3: [Fallback()]}},), {}, 'args[0]["a"][3][0]'),
        ((Point(1, Fallback()),), {}, "args[0].y"),
        ((Config("c", (), {"k": Fallback()}),), {}, 'args[0].weight["k"]'),
        (({Fallback(): 1},), {}, "args[0].keys()[0]"),
        (({1, Fallback()},), {}, "args[0]{...}"),
        ((Box(1, Fallback()),), {}, "args[0][1]"),
    ],
)
def test_a_refusal_names_the_type_the_place_and_two_ways_out(workers, args, kwargs, place):
    with pytest.raises(NotSerializable) as refused:
        workers[0].run(gradwire.rpc_sync, "w1", exotic.echo, args, kwargs)
    assert str(refused.value) == (
        f"{place}: a value of type tests.security.exotic.Fallback cannot be serialized\n"
        "hint: give its class a codec with gradwire.register_codec on both workers, or allow "
        "pickles with Options(pickle=True) on both"
    )


def test_a_result_is_refused_likewise(workers):
    with pytest.raises(
        NotSerializable, match=r"result: a value of type .*\.Fallback cannot be serialized"
    ):
        workers[0].run(gradwire.rpc_sync, "w1", Fallback)


# --- codecs ---------------------------------------------------------------------------------------


def test_a_codec_carries_whatever_travels(workers):
    came = send(workers, [Box(1, torch.ones(2), Money(3)), Money(4)])
    assert type(came[0]) is Box
    assert came[0].inside[0] == 1
    assert torch.equal(came[0].inside[1], torch.ones(2))
    assert came[0].inside[2] == Money(3)
    assert came[1] == Money(4)


def test_a_tensor_in_a_codec_keeps_its_graph(workers):
    def program():
        x = torch.ones(2, requires_grad=True)
        with gradwire.context():
            doubled = gradwire.rpc_sync("w1", exotic.inside, (Box(2 * x),))
            doubled[0].sum().backward()
        return x.grad

    assert torch.equal(workers[0].run(program), torch.full((2,), 2.0))


def test_a_codec_that_one_side_lacks_is_named(workers, monkeypatch):
    codec = workers[0].worker.calls._bodies._codec
    packed = codec.encode(Money(1))
    monkeypatch.setattr(named_types, "_BY_NAME", {})
    with pytest.raises(NotExposed, match=r"exotic:Money' has no codec on this worker") as refused:
        codec.decode(packed.data, ())
    assert "register_codec" in refused.value.hint


def test_what_a_codec_refuses_is_a_bad_message(workers):
    codec = workers[0].worker.calls._bodies._codec
    data = codec.encode(Money(1)).data.replace(b"\x01", b"\xc0")
    with pytest.raises(BadMessage, match="TypeError: cents are a number"):
        codec.decode(data, ())


def test_a_codec_is_for_a_class_with_a_name():
    with pytest.raises(ArgumentTypeError, match="a codec is for a class"):
        gradwire.register_codec(Money(1), str, str)
    local = type("Local", (), {"__qualname__": "f.<locals>.Local"})
    with pytest.raises(NotExposed, match="no other worker could find it"):
        gradwire.register_codec(local, str, str)


# --- pickle ---------------------------------------------------------------------------------------


def pickling(n=2):
    return cluster(n, expose=[HERE, exotic], options=Options(pickle=True))


def test_pickle_is_off_unless_asked_for():
    assert Options().pickle is False


def test_where_both_sides_ask_for_it_what_is_not_data_travels_as_a_pickle():
    with pickling() as workers:
        assert workers[0].run(gradwire.rpc_sync, "w1", exotic.is_odd, (Fallback(),))
        came = workers[0].run(
            gradwire.rpc_sync, "w1", exotic.echo, ([Fallback({"k": 1}), Money(2)],)
        )
        assert came[0].inside == {"k": 1}
        assert came[1] == Money(2)


def test_tensors_and_references_in_a_pickle_travel_beside_it_and_keep_their_graph():
    def program():
        x = torch.ones(2, requires_grad=True)
        with gradwire.context():
            y = torch.full((2,), 5.0)
            tripled = gradwire.rpc_sync("w1", exotic.product, (Fallback(x),))
            both = gradwire.rpc_sync("w1", exotic.echo, ([y, Fallback(2 * x), Fallback((y, y))],))
            (tripled + both[1].inside).sum().backward()
        assert torch.equal(both[0], y)
        assert torch.equal(both[2].inside[1], y)
        held = gradwire.rpc_sync("w1", exotic.echo, (Fallback(gradwire.RRef(7)),))
        return x.grad, held.inside.to_here()

    with pickling() as workers:
        gradient, value = workers[0].run(program)
    assert torch.equal(gradient, torch.full((2,), 5.0))
    assert value == 7


def test_one_side_alone_does_not_make_the_other_load_a_pickle(tmp_path, workers):
    marker = tmp_path / "marker"
    with pickling() as asking:
        packed = asking[0].worker.calls._bodies._codec.encode(Bomb(str(marker)))
    receiver = workers[1].worker.calls._bodies._codec
    with pytest.raises(BadMessage, match="a pickle came, which this worker does not load") as no:
        receiver.decode(packed.data, ())
    assert "Options(pickle=True)" in no.value.hint
    assert not marker.exists()


def test_functions_go_by_name_though_pickles_travel():
    with pickling() as workers, pytest.raises(NotExposed, match="builtins:eval is not exposed"):
        workers[0].run(gradwire.rpc_sync, "w1", eval, ("1",))


def test_what_has_no_pickle_either_is_named():
    with (
        pickling() as workers,
        pytest.raises(NotSerializable, match=r"a generator cannot be serialized"),
    ):
        workers[0].run(gradwire.rpc_sync, "w1", exotic.echo, ((n for n in ()),))


def over_processes():
    assert gradwire.rpc_sync("w1", exotic.echo, (Box(Money(1)),)).inside == (Money(1),)
    return gradwire.rpc_sync("w1", exotic.is_odd, (Fallback(),))


@pytest.mark.slow
@pytest.mark.processes
def test_codecs_and_pickles_between_processes():
    with process_cluster(2, expose=[exotic], options=Options(pickle=True)):
        assert over_processes()
    with process_cluster(2, expose=[exotic]), pytest.raises(NotSerializable, match="Fallback"):
        over_processes()
