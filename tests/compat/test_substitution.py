from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed.autograd
import torch.distributed.rpc as stock_rpc

from gradwire.compat.substitution import (
    MODULES,
    PARTS,
    _import_binders,
    install,
    installed,
    uninstall,
)
from gradwire.errors import UsageError

LATE = "torch.distributed.rpc.late"
ALL = MODULES | {LATE: "standin.rpc.late", f"{LATE}.inner": "standin.rpc.late.inner"}


def standing_in(name: str) -> str:
    return name.replace("gradwire.compat", "standin")


def made(name: str, **names: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    for value in names.values():
        if isinstance(value, type):
            value.__module__ = name
    return module


class RRef:
    pass


class DistAutogradContext:
    pass


class DistributedOptimizer:
    pass


@pytest.fixture
def modules(monkeypatch):
    """Empty modules in the place of ours but for a few names, each reached from its package."""
    contents = {
        "standin.rpc": {
            "RRef": RRef,
            "PyRRef": RRef,
            "is_available": lambda: True,
            "_is_current_rpc_agent_set": lambda: False,
        },
        "standin.rpc.api": {"RRef": RRef, "rpc_sync": lambda *_: "ours"},
        "standin.optim": {"DistributedOptimizer": DistributedOptimizer},
        "standin.futures": {"wait_all": lambda _: "ours"},
        "standin.autograd": {"DistAutogradContext": DistAutogradContext},
    }
    names = {standing_in(ours) for ours in (ALL | PARTS).values()}
    for name in sorted({"standin", *names}):
        module = made(name, **contents.get(name, {}))
        module.__path__ = []
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)
        monkeypatch.setitem(sys.modules, name, module)
    yield sys.modules
    uninstall()


def put_standins() -> None:
    install(
        {theirs: standing_in(ours) for theirs, ours in ALL.items()},
        {theirs: standing_in(ours) for theirs, ours in PARTS.items()},
    )


def names_of_torch() -> dict[str, dict[str, int]]:
    _import_binders()
    return {
        name: {key: id(value) for key, value in vars(module).items()}
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "torch" and isinstance(module, ModuleType)
    }


def test_imports_find_ours(modules):
    put_standins()

    for theirs, ours in ALL.items():
        assert importlib.import_module(theirs) is modules[standing_in(ours)]


def test_what_nobody_has_imported_is_imported_when_it_is_asked_for(modules):
    spec = modules["standin.rpc.late"].__spec__
    put_standins()
    assert f"{LATE}.inner" not in sys.modules

    found = importlib.import_module(f"{LATE}.inner")

    assert found is modules["standin.rpc.late.inner"]
    assert sys.modules[LATE].__spec__ is spec
    uninstall()
    assert f"{LATE}.inner" not in sys.modules


def test_attributes_lead_to_ours(modules):
    put_standins()

    assert torch.distributed.rpc is modules["standin.rpc"]
    assert torch.distributed.rpc.api.rpc_sync() == "ours"
    assert torch.distributed.autograd is modules["standin.autograd"]


def test_names_that_torch_has_bound_already_are_ours(modules):
    put_standins()

    assert torch._jit_internal.RRef is RRef
    assert torch.nn.parallel.distributed.RRef is RRef
    assert torch.distributed.optim.DistributedOptimizer is DistributedOptimizer
    assert torch.distributed.optim.optimizer is modules["standin.optim"]


def test_names_of_the_extension_are_ours_where_we_have_them(modules):
    timeout = torch._C._distributed_rpc.get_rpc_timeout

    put_standins()

    assert torch._C._distributed_rpc.PyRRef is RRef
    assert torch._C._distributed_rpc.get_rpc_timeout is timeout
    assert torch._C._distributed_autograd.DistAutogradContext is DistAutogradContext


def test_futures_are_waited_for_by_ours(modules):
    put_standins()

    assert torch.futures.wait_all([]) == "ours"
    assert torch.futures.__name__ == "torch.futures"


def test_uninstalling_puts_every_name_back(modules):
    before = names_of_torch()
    put_standins()
    assert names_of_torch() != before

    uninstall()

    assert names_of_torch() == before
    assert sys.modules["torch.distributed.rpc"] is stock_rpc


def test_modules_of_torch_imported_meanwhile_get_the_names_of_torch(modules, monkeypatch):
    put_standins()
    later = made("torch.later", reference=RRef, rpc=torch.distributed.rpc, number=3)
    monkeypatch.setitem(sys.modules, "torch.later", later)

    uninstall()

    assert later.rpc is stock_rpc
    assert later.reference in (stock_rpc.RRef, stock_rpc.PyRRef)
    assert later.number == 3


def test_installing_twice_is_installing_once(modules):
    before = names_of_torch()
    put_standins()
    put_standins()

    uninstall()

    assert not installed()
    assert names_of_torch() == before


def test_what_cannot_be_imported_changes_nothing():
    before = names_of_torch()

    with pytest.raises(ModuleNotFoundError):
        install({"torch.distributed.rpc": "standin.nowhere"}, {})

    assert not installed()
    assert names_of_torch() == before


def test_a_program_that_has_begun_with_torchs_rpc_is_refused(modules, monkeypatch):
    monkeypatch.setattr(stock_rpc, "_is_current_rpc_agent_set", lambda: True)

    with pytest.raises(UsageError, match=r"already initialized in this process\nhint: call gradw"):
        put_standins()

    assert not installed()


def test_torch_is_not_put_back_under_a_running_worker(modules, monkeypatch):
    put_standins()
    with monkeypatch.context() as running:
        running.setattr(modules["standin.rpc"], "_is_current_rpc_agent_set", lambda: True)
        with pytest.raises(UsageError, match=r"still initialized in this process\nhint: call shut"):
            uninstall()

    assert installed()
