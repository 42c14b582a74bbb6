"""gradwire's modules in the place of torch's, and back.

`import torch` has already imported torch's own RPC modules, and several modules of torch have bound
names of theirs. So three things are exchanged: the entries of `sys.modules`, the attributes by
which packages reach their submodules, and every name in a module of torch whose value is one of the
objects replaced. What nobody has imported yet is replaced when somebody does.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final, final

from gradwire.errors import UsageError

_RPC = "torch.distributed.rpc"
_OURS = "gradwire.compat"
_RPC_MODULES = (
    "_utils",
    "constants",
    "internal",
    "options",
    "backend_registry",
    "rref_proxy",
    "api",
    "functions",
    "server_process_global_profiler",
)

MODULES: Final[Mapping[str, str]] = {
    _RPC: f"{_OURS}.rpc",
    **{f"{_RPC}.{name}": f"{_OURS}.rpc.{name}" for name in _RPC_MODULES},
    "torch.distributed.autograd": f"{_OURS}.autograd",
    "torch.distributed.optim.optimizer": f"{_OURS}.optim",
    "torch.distributed.nn.api.remote_module": f"{_OURS}.remote_module",
}
"""What stands for what; the same names are expected inside."""

PARTS: Final[Mapping[str, str]] = {
    "torch._C._distributed_rpc": f"{_OURS}.rpc",
    "torch._C._distributed_autograd": f"{_OURS}.autograd",
    "torch.futures": f"{_OURS}.futures",
    "torch.autograd.profiler_legacy": f"{_OURS}.profiler_legacy",
}
"""Modules that stay; what they define under a name that ours has too is exchanged in them."""

# Read before anything is exchanged: they bind names of the modules above when they are imported.
_BINDERS = ("torch.distributed.optim", "torch.distributed.nn")

_ABSENT: Final = object()


@final
class Substitution(MetaPathFinder):
    """One exchange of modules, which can be undone; finds those that are imported later."""

    def __init__(self, modules: Mapping[str, str], parts: Mapping[str, str]) -> None:
        """Exchange everything; what cannot be imported stops it before anything is changed."""
        self._modules = modules
        self._before: list[tuple[dict[str, object], str, object]] = []
        _import_binders()
        known = {name: import_module(ours) for name, ours in modules.items() if name in sys.modules}
        whole = [(sys.modules[name], ours) for name, ours in known.items()]
        partial = [(sys.modules[name], import_module(ours)) for name, ours in parts.items()]
        objects = [*whole, *_defined(whole + partial)]
        packages = {_home(ours) for ours in known.values()}
        self._theirs = {id(ours): theirs for theirs, ours in objects if _home(ours) in packages}
        entries = vars(sys)["modules"]
        for name in modules:
            if name not in known:
                self._before.append((entries, name, _ABSENT))
                continue
            self._set(entries, name, known[name])
            package, _, last = name.rpartition(".")
            if package not in modules:
                self._set(vars(entries[package]), last, known[name])
        replaced = {id(theirs): ours for theirs, ours in objects}
        for module in _modules_of_torch(but={ours.__name__ for ours in known.values()}):
            self._rebind(module, replaced)
        sys.meta_path.insert(0, self)

    def take_back(self) -> None:
        """Put every entry back, and torch's names into modules of torch imported meanwhile."""
        sys.meta_path.remove(self)
        for entries, key, value in reversed(self._before):
            if value is _ABSENT:
                entries.pop(key, None)
            else:
                entries[key] = value
        for module in _modules_of_torch():
            self._rebind(module, self._theirs)

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Only the names of the table."""
        return ModuleSpec(name, _Alias(self._modules[name])) if name in self._modules else None

    def _rebind(self, module: ModuleType, values: Mapping[int, object]) -> None:
        for name, value in list(vars(module).items()):
            if id(value) in values:
                self._set(vars(module), name, values[id(value)])

    def _set(self, entries: dict[str, object], key: str, value: object) -> None:
        self._before.append((entries, key, entries.get(key, _ABSENT)))
        entries[key] = value


@final
class _Alias(Loader):
    """Imports a module that exists under another name."""

    def __init__(self, ours: str) -> None:
        self._module = import_module(ours)
        self._spec = self._module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the other one's


_current: list[Substitution] = []  # at most one: what the process has in place of torch's modules


def installed() -> bool:
    """Whether gradwire stands in torch's place in this process."""
    return bool(_current)


def install(modules: Mapping[str, str] = MODULES, parts: Mapping[str, str] = PARTS) -> None:
    """Put gradwire in torch's place, for this process and those it forks. Idempotent.

    It comes before the program imports what is replaced: names bound outside of torch stay torch's.
    """
    if installed():
        return
    import_module("torch")
    _refuse_while_running(
        "torch.distributed.rpc is already initialized in this process",
        hint="call gradwire.compat.install() before init_rpc(), or start the program with"
        " python -m gradwire.compat",
    )
    _current.append(Substitution(modules, parts))


def uninstall() -> None:
    """Put torch's own modules back, each the very object that it was."""
    if not installed():
        return
    _refuse_while_running(
        "gradwire's RPC is still initialized in this process",
        hint="call shutdown() before gradwire.compat.uninstall()",
    )
    _current.pop().take_back()


def _refuse_while_running(message: str, hint: str) -> None:
    running = getattr(sys.modules[_RPC], "_is_current_rpc_agent_set", None)
    if running is not None and running():
        raise UsageError(message, hint=hint)


def _import_binders() -> None:
    with warnings.catch_warnings():  # the program may never have asked for them
        warnings.simplefilter("ignore")
        for name in _BINDERS:
            import_module(name)


def _defined(pairs: list[tuple[ModuleType, ModuleType]]) -> Iterator[tuple[object, object]]:
    """The classes and functions that torch defines in these modules, and what stands for each."""
    homes = {theirs.__name__ for theirs, _ in pairs}
    for theirs, ours in pairs:
        for name, value in vars(theirs).items():
            if getattr(value, "__module__", None) in homes and hasattr(ours, name):
                yield value, getattr(ours, name)


def _home(value: object) -> str:
    """The package that defines it."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).split(".")[0]


def _modules_of_torch(but: Set[str] = frozenset()) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "torch"
        and isinstance(module, ModuleType)
        and module.__name__ not in but
    ]
