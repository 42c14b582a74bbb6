"""The private names of torch that gradwire needs are checked by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gradwire import torch_private

SOURCE = Path(torch_private.__file__).parent


def test_this_torch_has_all_of_them():
    assert torch_private.missing_names() == []


@pytest.mark.parametrize("name", ["_set_sequence_nr", "_sequence_nr", "_backward_cls"])
def test_what_the_order_of_waiting_rests_on_is_among_them(name):
    assert any(path.endswith(f".{name}") for path in torch_private._NEEDED)


def test_a_missing_name_is_told(monkeypatch):
    monkeypatch.setattr(torch_private, "_NEEDED", ("torch.sin", "torch._C._no_such_name"))

    assert torch_private.missing_names() == ["torch._C._no_such_name"]


def test_every_private_name_that_is_written_out_is_among_them():
    written = {
        ast.unparse(node)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    private = {name for name in written if name.startswith("torch.") and is_private(name)}

    needed = torch_private._NEEDED
    assert private
    assert [name for name in private if not any(is_part(name, path) for path in needed)] == []


def is_private(name):
    parts = [part for part in name.split(".") if not part.startswith("__")]
    return all(map(str.isidentifier, parts)) and any(part.startswith("_") for part in parts)


def is_part(name, path):
    """Whether one of the two leads to the other."""
    return f"{name}.".startswith(f"{path}.") or f"{path}.".startswith(f"{name}.")
