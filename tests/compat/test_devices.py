"""Whether the device maps of all workers fit together."""

from __future__ import annotations

import pytest
import torch

from gradwire.compat.rpc.agent import DeviceFacts, check_device_maps

C0, C1, C9, CPU = (torch.device(name) for name in ["cuda:0", "cuda:1", "cuda:9", "cpu"])


def facts(name="a", maps=None, devices=(), count=2):
    return DeviceFacts(name, count, maps or {}, list(devices))


B = facts("b", devices=[C0])


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (facts(devices=[C0, C0]), "duplicated devices"),
        (facts(devices=[C9]), "devices with invalid indices"),
        (facts(maps={"x": {}}), "invalid target node names in its device maps"),
        (facts(maps={"b": {C0: C0, C1: C0}}), "duplicated target devices in its device map for b"),
        (facts(maps={"b": {C1: C0}}, devices=[C0]), "unexpected source devices in its device map"),
        (facts(maps={"b": {C9: C0}}), "source devices with invalid indices in its device map"),
        (facts(maps={"b": {C0: C1}}), "unexpected target devices in its device map for b"),
        (facts(maps={"a": {C0: C9}}), "target devices with invalid indices in its device map"),
    ],
)
def test_what_does_not_fit_is_named(mine, text):
    with pytest.raises(ValueError, match=f"Node a has {text}"):
        check_device_maps([mine, B])


def test_what_fits_is_fine():
    check_device_maps([facts(maps={"b": {C1: C0}, "a": {CPU: CPU}}), B])


def test_one_that_has_not_joined_yet_may_be_named_in_an_open_world():
    check_device_maps([facts(maps={"later": {C0: C9}})], is_static_group=False)


def test_a_note_says_all_of_it():
    said = facts(maps={"b": {C1: C0}}, devices=[C1, C0])

    assert DeviceFacts.from_note(said.to_note()) == said
