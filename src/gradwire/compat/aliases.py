"""Modules that are found under a second name: one module, not a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final


@final
class Aliases(MetaPathFinder, Loader):
    """Imports a name as the module that stands for it, when it is asked for."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Only the names of the table."""
        return ModuleSpec(name, self) if name in self._modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, under its own name."""
        module = import_module(self._modules[spec.name])
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed; give it back the spec that the import system has taken."""
        taken = module.__spec__
        if taken is not None:
            module.__spec__ = self._specs.pop(taken.name)
