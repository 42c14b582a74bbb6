"""What a process gives to those it starts, and gets back."""

from __future__ import annotations

import pytest
import torch

from gradwire import UsageError
from gradwire.launch.child import pickled, unpickled
from gradwire.rpc.codec.pickle_codec import sent_exception


class Fallback(Exception):
    pass


def test_values_arrive_as_copies():
    sent = {"x": torch.ones(2, requires_grad=True), "n": [1, 2]}

    came = unpickled(pickled(sent, "it"), "it")

    assert torch.equal(came["x"], sent["x"])
    assert came["x"].requires_grad
    assert came["x"].data_ptr() != sent["x"].data_ptr()
    assert came["n"] == [1, 2]


def test_a_tensor_is_not_moved_to_shared_memory():
    x = torch.ones(2)

    pickled(x, "it")

    assert not x.is_shared()


def test_modules_go_by_name():
    assert unpickled(pickled([torch.nn, pytest], "it"), "it") == [torch.nn, pytest]


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(UsageError, match=r"my thing cannot be pickled: .*lambda") as caught:
        pickled(lambda: 1, "my thing", hint="do otherwise")
    assert caught.value.hint == "do otherwise"


def test_what_cannot_be_unpickled_is_named():
    with pytest.raises(UsageError, match="my thing cannot be unpickled here: "):
        unpickled(b"no pickle", "my thing")


def test_exceptions_are_found_in_any_module_of_ours():
    assert sent_exception("builtins:KeyError") is KeyError
    assert sent_exception(f"{__name__}:Fallback") is Fallback
    assert sent_exception(f"{__name__}:pickled") is None
    assert sent_exception("no.such.module:Error") is None
