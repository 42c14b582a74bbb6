"""Subclasses of builtin types and of Tensor, and generators."""

from __future__ import annotations

import sys

import msgspec
import pytest
import torch

import gradwire as gw
from gradwire.errors import BadMessage, NotExposed, NotSerializable
from gradwire.options import Limits
from gradwire.rpc.codec.codec import Codec
from gradwire.rpc.codec.walk import Tag
from gradwire.rpc.expose.registry import Registry
from gradwire.testing import cluster

HERE = sys.modules[__name__]
RAN: list[str] = []


class Noted:
    """What of a class may run: nothing."""

    def __init__(self, *args, **kwargs):
        RAN.append("__init__")
        super().__init__(*args, **kwargs)


class Row(Noted, list):
    def append(self, item):
        RAN.append("append")
        super().append(item)

    def total(self):
        return sum(self)


class Table(Noted, dict):
    def __setitem__(self, key, value):
        RAN.append("__setitem__")

    def update(self, *args):
        RAN.append("update")


class Slotted(dict):
    __slots__ = ("unit",)


class Pair(tuple):
    @property
    def first(self):
        return self[0]


class Word(str):
    __slots__ = ()


class Image(torch.Tensor):
    """With the attribute of an object."""

    def brightest(self):
        return self.max()


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def brighter(image):
    assert type(image) is Image
    assert image.title == "moon"
    return image * 2


def drawn(generator):
    return torch.rand(3, generator=generator)


@pytest.fixture(scope="module")
def codec():
    return Codec(Registry([HERE]), Limits())


@pytest.fixture(scope="module")
def workers():
    with cluster(2, expose=[HERE]) as made:
        yield made


def crossed(codec, value):
    data, tensors, _ = codec.encode(value)
    return codec.decode(data, tensors)


@pytest.mark.parametrize(
    "sent",
    [Row([1, [2]]), Row(), Table({"a": 1, 2: (3,)}), Pair((1, Pair())), Word("ü"), Word("\udcff")],
    ids=ascii,
)
def test_an_instance_of_a_subclass_arrives_as_one_and_no_code_of_it_runs(codec, sent):
    if type(sent) not in (Word,):
        sent.note = ["kept", torch.ones(1)]
    RAN.clear()

    got = crossed(codec, [sent])[0]

    assert RAN == []
    assert type(got) is type(sent)
    assert got == sent
    assert getattr(got, "note", None) == getattr(sent, "note", None)
    if isinstance(sent, Pair) and len(sent) > 1:
        assert type(got[1]) is Pair


def test_slots_arrive(codec):
    sent = Slotted(a=1)
    assert not hasattr(crossed(codec, sent), "unit")
    sent.unit = "m"

    assert crossed(codec, sent).unit == "m"


def test_a_tensor_of_a_subclass_arrives_as_one_with_its_graph(workers):
    x = torch.ones(3, requires_grad=True)
    image = x.as_subclass(Image)
    image.title = "moon"

    got = workers[0].run(gw.rpc_sync, "w1", brighter, args=(image,))
    assert type(got) is Image
    got.as_subclass(torch.Tensor).sum().backward()

    assert x.grad.tolist() == [2, 2, 2]


def test_a_leaf_of_a_subclass_gets_its_gradient(workers):
    image = torch.ones(3).as_subclass(Image).requires_grad_()
    image.title = "moon"

    with torch.no_grad():
        silent = workers[0].run(gw.rpc_sync, "w1", brighter, args=(image,))
    got = workers[0].run(gw.rpc_sync, "w1", brighter, args=(image,))
    got.sum().backward()

    assert not silent.requires_grad
    assert image.grad.tolist() == [2, 2, 2]


def test_a_class_that_the_receiver_has_not_exposed_is_refused(codec):
    data = codec.encode(Row([1])).data

    with pytest.raises(NotExposed, match="Row is not exposed"):
        Codec(Registry(), Limits()).decode(data, [])


def test_what_cannot_cross_whole_is_refused(codec):
    odd, shadowing = Row(), Pair((1,))
    odd.total = 5
    vars(shadowing)["first"] = 5
    for value in (odd, shadowing):
        with pytest.raises(NotSerializable, match="which is a method or property of its class"):
            codec.encode(value)
    with pytest.raises(NotSerializable, match=r"args\[0\]: a value of type .*object cannot"):
        codec.encode(Row([object()]))
    with pytest.raises(NotSerializable, match="Wrapper cannot be serialized"):
        codec.encode(torch.Tensor._make_wrapper_subclass(Wrapper, (2,)))


NAMES = {kind: f"{__name__}:{kind.__name__}" for kind in (Row, Table, Pair, Word, Image, Wrapper)}
LIST, DICT = [Tag.LIST], [Tag.DICT]


@pytest.mark.parametrize(
    "node",
    [
        [NAMES[Row], LIST, [Tag.DICT, "total", 5]],
        [NAMES[Row], LIST, [Tag.DICT, "__class__", 5]],
        [NAMES[Row], LIST, [Tag.DICT, "a b", 5]],
        [NAMES[Row], LIST, [Tag.DICT, 1, 5]],
        [NAMES[Row], LIST, LIST],
        [NAMES[Row], [Tag.TUPLE], DICT],
        [NAMES[Row], 5, DICT],
        [NAMES[Row], LIST],
        [NAMES[Table], [Tag.LIST, 1], DICT],
        [NAMES[Table], [Tag.LIST, 1, 2, 1, 3], DICT],
        [NAMES[Pair], LIST, [Tag.DICT, "first", 5]],
        [NAMES[Word], [Tag.LIST, 5], DICT],
        [NAMES[Word], [Tag.LIST, "a", "b"], DICT],
        [NAMES[Word], [Tag.LIST, "a"], [Tag.DICT, "a", 1]],
        [NAMES[Image], LIST, DICT],
        [NAMES[Image], [Tag.TENSOR, 0], DICT],
        [NAMES[Wrapper], LIST, DICT],
        [f"{__name__}:drawn", LIST, DICT],
        [f"{__name__}:Noted", LIST, DICT],
        [5, LIST, DICT],
    ],
    ids=repr,
)
def test_what_no_correct_peer_sends_is_a_bad_message(codec, node):
    with pytest.raises(BadMessage):
        codec.decode(msgspec.msgpack.encode([Tag.SUBCLASS, *node]), [])


def test_a_generator_arrives_with_its_state(workers):
    generator = torch.Generator().manual_seed(7)
    torch.rand(5, generator=generator)
    wanted = torch.rand(3, generator=generator.clone_state())

    got = workers[0].run(gw.rpc_sync, "w1", drawn, args=(generator,))

    assert torch.equal(got, wanted)
    assert torch.equal(drawn(generator), wanted)  # the other worker has drawn from its own


@pytest.mark.parametrize(
    "state",
    [
        torch.ones(4),
        torch.zeros(5, dtype=torch.uint8),
        torch.full((5056,), 255, dtype=torch.uint8),
        torch.ones(5056),
    ],
    ids=lambda state: f"{state.dtype} {state.shape[0]}",
)
def test_a_state_that_is_none_is_a_bad_message(codec, state):
    with pytest.raises(BadMessage):
        codec.decode(msgspec.msgpack.encode([Tag.GENERATOR, [Tag.TENSOR, 0]]), [state])
    with pytest.raises(BadMessage):
        codec.decode(msgspec.msgpack.encode([Tag.GENERATOR, 0]), [state])
