"""The private names of torch that gradwire needs are checked by name."""

from __future__ import annotations

import pytest

from gradwire import torch_private


def test_this_torch_has_all_of_them():
    assert torch_private.missing_names() == []


@pytest.mark.parametrize("name", ["_set_sequence_nr", "_sequence_nr", "_backward_cls"])
def test_what_the_order_of_waiting_rests_on_is_among_them(name):
    assert any(path.endswith(f".{name}") for path in torch_private._NEEDED)


def test_a_missing_name_is_told(monkeypatch):
    monkeypatch.setattr(torch_private, "_NEEDED", ("torch.sin", "torch._C._no_such_name"))

    assert torch_private.missing_names() == ["torch._C._no_such_name"]
