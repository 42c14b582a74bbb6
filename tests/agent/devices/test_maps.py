"""On which device a tensor arrives."""

from __future__ import annotations

import pytest
import torch

from gradwire.agent.devices.maps import checked_map, inverted, split_name, unmapped
from gradwire.errors import UsageError


def test_numbers_and_devices_are_names_too():
    assert checked_map({0: 1, torch.device("cuda:2"): "cuda:0", "cpu": "cuda:3"}, "w1") == {
        "cuda:0": "cuda:1",
        "cuda:2": "cuda:0",
        "cpu": "cuda:3",
    }
    assert checked_map({"cuda": "cpu"}, "w1") == {"cuda:0": "cpu"}


def test_the_way_back_is_the_inverted_map():
    assert inverted({"cuda:0": "cuda:1", "cuda:1": "cpu"}) == {"cuda:1": "cuda:0", "cpu": "cuda:1"}
    assert inverted(None) is None
    assert inverted({}) is None


def test_two_devices_may_not_arrive_on_one():
    with pytest.raises(UsageError, match="two devices that arrive on the same one"):
        checked_map({0: 1, 1: 1}, "w1")


@pytest.mark.parametrize("wrong", ["", "cuda:x", "cuda:-1", "a/b:0"])
def test_what_names_no_device(wrong):
    with pytest.raises(UsageError, match="names no device"):
        checked_map({wrong: 0}, "w1")


def test_a_device_without_a_map_is_named_by_its_uuid():
    assert split_name(unmapped("cuda:3", "GPU-1")) == ("cuda:3", "GPU-1")
    assert split_name("cuda:3") == ("cuda:3", "")
