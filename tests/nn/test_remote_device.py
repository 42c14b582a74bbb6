"""Strings that say where a module lives."""

from __future__ import annotations

import pytest

from gradwire.errors import UsageError
from gradwire.nn.remote_module import parse_remote_device


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("w1", ("w1", "cpu")),
        ("w1/cpu", ("w1", "cpu")),
        ("trainer:1/cuda:3", ("trainer:1", "cuda:3")),
        ("w1/cuda", ("w1", "cuda")),
        ("rank:0", (0, "cpu")),
        ("rank:12/meta", (12, "meta")),
    ],
)
def test_a_place_is_a_worker_and_a_device(text, place):
    assert parse_remote_device(text) == place


@pytest.mark.parametrize(
    ("text", "story"),
    [
        ("", "'' is not <worker>/<device>"),
        ("/", "'/' is not <worker>/<device>"),
        ("/cpu", "'/cpu' is not <worker>/<device>"),
        ("w1/", "'w1/' is not <worker>/<device>"),
        ("w1/cuda:0/cuda:1", "'w1/cuda:0/cuda:1' is not <worker>/<device>"),
        ("w1/gpu", "'w1/gpu' names no device: Expected one of"),
        ("w1/cpu2", "'w1/cpu2' names no device: Invalid device string: 'cpu2'"),
        ("rank:", "'rank:': '' is no number of a worker"),
        ("rank:-1", "'rank:-1': '-1' is no number of a worker"),
        ("rank:one/cpu", "'rank:one/cpu': 'one' is no number of a worker"),
        (3, "a int names no place for a module"),
    ],
)
def test_what_names_no_place_is_refused_with_what_does(text, story):
    with pytest.raises(UsageError) as refused:
        parse_remote_device(text)

    assert refused.value.message.startswith(story)
    assert "w1/cuda:0" in refused.value.hint
