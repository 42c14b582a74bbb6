"""The public names: all of them there, each documented, none by accident."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import gradwire

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def public_names() -> set[str]:
    """What `gradwire.` offers, but for the modules that importing has put there."""
    return {
        name
        for name, value in vars(gradwire).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


def test_all_is_what_is_there():
    assert set(gradwire.__all__) == public_names()


def test_no_name_is_exported_twice():
    assert len(gradwire.__all__) == len(set(gradwire.__all__))


@pytest.mark.parametrize("name", gradwire.__all__)
def test_every_public_name_has_a_docstring_of_its_own(name):
    value = getattr(gradwire, name)

    documented = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__

    assert documented
    assert not documented.startswith(f"{name}("), "that is what dataclasses write by themselves"


@pytest.mark.parametrize("name", gradwire.__all__)
def test_every_public_name_is_defined_by_gradwire(name):
    assert getattr(gradwire, name).__module__.split(".")[0] == "gradwire"


def test_the_version_is_said_once():
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]

    assert getattr(gradwire, "__version__", project["version"]) == project["version"]
