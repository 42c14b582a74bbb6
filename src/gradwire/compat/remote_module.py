"""RemoteModule with the names, limits and texts of torch.distributed.nn; it is sent as a pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.remote_device import _remote_device

from gradwire.compat.rpc import api
from gradwire.compat.rpc.agent import _get_current_rpc_agent, _is_current_rpc_agent_set
from gradwire.compat.rpc.internal import _internal_rpc_pickler
from gradwire.errors import UsageError
from gradwire.nn import remote_functions
from gradwire.nn import remote_module as native
from gradwire.rpc.api import keywords, of_sequence

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
_METHODS = ("forward_async", "forward")

# Refused beyond what gradwire's own refuses, as in torch.
_HOOKS = ("register_backward_hook", "register_forward_pre_hook", "register_forward_hook")
_STATE = ("state_dict", "load_state_dict", "named_parameters", "buffers", "named_buffers")
_TREE = ("apply", "modules", "named_modules", "requires_grad_", "zero_grad", "extra_repr")


class _RemoteModule(native.RemoteModule):
    """The base class of torch's, with an argument for the interface of a scripted module."""

    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: tuple[str, ...]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[object, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: object = None,
    ) -> None:
        nn.Module.__init__(self)
        self._settle(remote_device, _module_interface_cls)
        made = (module_cls, of_sequence(args), keywords(kwargs), self.device)
        self.module_rref = api.remote(self.on, _create_module, made)

    @staticmethod
    def init_from_module_rref(  # type: ignore[override]
        remote_device: str,
        module_rref: api.RRef[nn.Module],
        _module_interface_cls: object = None,
    ) -> _RemoteModule:
        """One for a module that exists."""
        made = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(made)
        made._settle(remote_device, _module_interface_cls)
        made.module_rref = module_rref
        return made

    def _settle(self, remote_device: str, interface: object) -> None:
        if not _is_current_rpc_agent_set():
            raise AssertionError("RemoteModule only works in RPC.")
        if interface is not None and torch.jit._state._enabled.enabled:
            raise UsageError(
                f"a RemoteModule on {remote_device} was asked for with a TorchScript interface, "
                "which gradwire does not have",
                hint="leave _module_interface_cls out, or set PYTORCH_JIT=0",
            )
        place = _remote_device(remote_device)
        worker = place.rank() if place.worker_name() is None else place.worker_name()
        self.device = str(place.device())
        info = api.get_worker_info(worker)
        device_map: Any = getattr(_get_current_rpc_agent(), "_get_device_map", lambda _: {})
        self.on = info.name
        self.is_device_map_set = bool(device_map(info))
        self.is_scriptable = interface is not None
        self.generated_methods = _METHODS

    def forward_async(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the module's forward on its worker; a future of what it returns."""
        rref = self.module_rref
        args = (rref, self.device, *args)
        return api.rpc_async(rref.owner(), remote_functions.forward, args, kwargs)

    def _ask(self, func: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        return api.rpc_sync(self.module_rref.owner(), func, (self.module_rref, *args), kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Its forward: there are no hooks here."""
        return self.forward(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Refused: they are not here."""
        raise ValueError(
            "Method ``parameters`` not supported for RemoteModule. "
            "Please use ``remote_parameters`` instead."
        )

    def _refuse(self, method: str, hint: str) -> NoReturn:
        raise ValueError(f"Method ``{method}`` not supported for RemoteModule")


for _name in (*_HOOKS, *_STATE, *_TREE):
    setattr(_RemoteModule, _name, native._refused(_name, ""))


class RemoteModule(_RemoteModule):
    """A module that lives on another worker and is used from here."""


def _create_module(
    make: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any], device: str
) -> nn.Module:
    try:
        return remote_functions.create(make, args, kwargs, device)
    except UsageError as error:
        if error.__cause__ is not None:  # what torch says of the device
            raise error.__cause__ from None
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but "
            f"{error.message}"
        ) from error


def _reduced(module: _RemoteModule) -> tuple[Callable[..., RemoteModule], tuple[object, ...]]:
    """How it is pickled for a peer: the parts that torch names, and nothing else of it."""
    return _arrived, tuple(getattr(module, name) for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES)


def _arrived(*parts: object) -> RemoteModule:
    """It is not set up as a module: what it has is what programs look for in its `__dict__`."""
    module = RemoteModule.__new__(RemoteModule)
    module.__dict__.update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, parts, strict=True))
    for name in module.generated_methods:
        module.__dict__[name] = getattr(module, name)
    return module


for _class in (_RemoteModule, RemoteModule):
    _internal_rpc_pickler._register_reducer(_class, _reduced)
