"""Carries the substitution into processes that a program under `python -m gradwire.compat` starts.

That command puts this directory first on PYTHONPATH, so every Python started below it runs this
file as it begins, unless by -I, -E or -S. It imports nothing heavy, for processes that never import
torch. In others `gradwire.compat.install()` follows as soon as the import of torch is over.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent


class _Announcing(Loader):
    """Stands for a loader during the import of its module; the finder hears when it is over."""

    def __init__(self, real: Loader, finder: AfterTorch) -> None:
        self._real, self._finder = real, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._finder.under_way.add(module.__name__)
        try:
            self._real.exec_module(module)
        finally:
            self._finder.under_way.discard(module.__name__)
        self._finder.executed()


class AfterTorch(MetaPathFinder):
    """Finds torch as usual, and installs once it is imported, and gradwire, which may import it."""

    def __init__(self) -> None:
        self.under_way: set[str] = set()  # modules that are being executed

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Only torch and gradwire; everything else is left to the finders that follow."""
        if name not in ("torch", "gradwire"):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Announcing(spec.loader, self)
        return spec

    def executed(self) -> None:
        """One of the two is there; install when neither is under way."""
        if "torch" in sys.modules and not self.under_way and self in sys.meta_path:
            sys.meta_path.remove(self)
            root = str(HERE.parents[2])
            if PathFinder.find_spec("gradwire") is None and root not in sys.path:
                sys.path.append(root)
            from gradwire.compat import install

            install()


def run_the_next() -> None:
    """The sitecustomize that this one hides, if the machine has one."""
    others = [place for place in sys.path if Path(place).resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, AfterTorch())
    run_the_next()
