"""Distributions of torch, as they are: values, draws and gradients."""

from __future__ import annotations

import sys

import msgspec
import pytest
import torch
from torch import distributions as d

import gradwire as gw
from gradwire.errors import BadMessage, NotSerializable
from gradwire.options import Limits
from gradwire.rpc.codec.codec import Codec
from gradwire.rpc.codec.walk import Tag
from gradwire.rpc.expose.registry import Registry
from gradwire.testing import cluster

HERE = sys.modules[__name__]
TWO = torch.tensor([0.3, 0.7])
MADE = {
    "normal": d.Normal(TWO, TWO),
    "categorical": d.Categorical(probs=torch.tensor([0.1, 0.3, 0.2])),
    "categorical of logits": d.Categorical(logits=TWO),
    "bernoulli": d.Bernoulli(0.3),
    "beta": d.Beta(TWO, TWO),
    "student": d.StudentT(TWO),
    "many normals": d.MultivariateNormal(TWO, torch.eye(2)),
    "transformed": d.LogNormal(TWO, TWO),
    "independent": d.Independent(d.Normal(TWO, TWO, validate_args=False), 1),
    "mixture": d.MixtureSameFamily(d.Categorical(TWO), d.Normal(TWO, TWO)),
    "composed": d.TransformedDistribution(
        d.Normal(TWO, 1.0),
        [d.AffineTransform(1.0, TWO), d.ComposeTransform([d.SigmoidTransform()])],
    ),
    "relaxed": d.RelaxedOneHotCategorical(torch.tensor(0.5), TWO),
}


def log_prob(distribution, value):
    return distribution.log_prob(value)


@pytest.fixture(scope="module")
def codec():
    return Codec(Registry([HERE]), Limits())


def crossed(codec, value):
    data, tensors, _ = codec.encode(value)
    return codec.decode(data, tensors)


def drawn(distribution):
    torch.manual_seed(0)
    return distribution.sample((3,))


@pytest.mark.parametrize("name", MADE)
def test_a_distribution_arrives_as_it_is(codec, name):
    sent = MADE[name]

    got = crossed(codec, [sent])[0]

    assert type(got) is type(sent)
    assert (got.batch_shape, got.event_shape) == (sent.batch_shape, sent.event_shape)
    assert torch.equal(drawn(got), drawn(sent))
    value = drawn(sent)
    assert torch.equal(got.log_prob(value), sent.log_prob(value))
    assert torch.equal(drawn(crossed(codec, got)), drawn(sent))  # also once more, when used


def test_its_gradients_come_back_as_in_one_process():
    def gradient(of):
        probs = torch.tensor([0.1, 0.3, 0.2], requires_grad=True)
        of(d.Categorical(probs=probs), torch.tensor(1)).backward()
        return probs.grad

    def remote(*args):
        return gw.rpc_sync("w1", log_prob, args=args)

    with cluster(2, expose=[HERE]) as workers:
        assert torch.equal(workers[0].run(gradient, remote), gradient(log_prob))


def test_what_it_holds_besides_is_refused(codec):
    odd = d.Normal(0.0, 1.0)
    odd.sample = len
    strange = d.Normal(0.0, 1.0)
    strange.label = "a"
    inverse = d.TransformedDistribution(d.Normal(0.0, 1.0), [d.ExpTransform().inv])

    for value in (odd, strange):
        with pytest.raises(NotSerializable, match=r"args\.(sample|label): a Normal that holds a"):
            codec.encode(value)
    with pytest.raises(NotSerializable, match=r"_InverseTransform cannot be serialized"):
        codec.encode(inverse)


@pytest.mark.parametrize(
    "node",
    [
        ["Normal", "sample", 5],
        ["Normal", "mean", 5],
        ["Normal", "loc", "text"],
        ["Normal", "loc", [Tag.LIST, "text"]],
        ["Normal", "__class__", 5],
        ["Normal", 5, 5],
        ["Normal", "loc"],
        ["ExpTransform", "_inv", 5],
        ["Nowhere"],
        [5],
        [],
    ],
    ids=repr,
)
def test_what_no_correct_peer_sends_is_a_bad_message(codec, node):
    with pytest.raises(BadMessage):
        codec.decode(msgspec.msgpack.encode([Tag.DISTRIBUTION, *node]), [])
