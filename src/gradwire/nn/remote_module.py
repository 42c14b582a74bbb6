"""RemoteModule: a module that lives on another worker and is used like a local one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from gradwire.errors import BadMessage, RemoteError, UsageError
from gradwire.nn import remote_functions
from gradwire.nn.remote_functions import State
from gradwire.rpc.api import call_as, get_worker_info, keywords, positional, remote
from gradwire.rpc.calls.client import Calls
from gradwire.rpc.calls.futures import Future
from gradwire.rpc.expose.registry import expose
from gradwire.rpc.rref import RRef

Maker = Callable[..., nn.Module]
_HINT = 'write "w1/cuda:0", or "w1" for its CPU, or "rank:1/cuda:0" for the worker of that number'
_PLACED = "its device is part of its name, and its dtype an argument of its class"
_MADE_THERE = "do it in the module's own class, or in an exposed function on its worker"


def _refused(method: str, hint: str) -> Any:  # noqa: ANN401
    def refuse(self: RemoteModule, *_: object, **__: object) -> NoReturn:
        self._refuse(method, hint)

    refuse.__name__ = method
    refuse.__doc__ = "Refused: not possible for a module on another worker."
    return refuse


@expose
class RemoteModule(nn.Module):
    """`RemoteModule("w1/cuda:0", nn.Linear, (8, 4))`: a Linear on w1, used from here.

    Calling it runs its forward there, as part of the graph. `train`, `eval`,
    `requires_grad_`, `zero_grad`, `state_dict` and `load_state_dict` act on the module there, even
    when they are called on a local module that contains this one. `remote_parameters()` and
    `parameters()` return references. It may be sent in calls, and stands for the same module on
    every worker. An error in the module's constructor is raised by the first use of it.
    """

    on: str
    """the name of the worker"""
    device: str
    module_rref: RRef[nn.Module]
    _class_name = "RemoteModule"
    """of the module there, for errors and warnings, if this object made it"""

    def __init__(
        self,
        remote_device: str,
        module_cls: Maker,
        args: tuple[object, ...] | list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        worker, self.device = parse_remote_device(remote_device)
        self.on = get_worker_info(worker).name
        args = () if args is None else positional(args)
        self._class_name = getattr(module_cls, "__name__", self._class_name)
        made = (module_cls, args, keywords(kwargs), self.device)
        self.module_rref = remote(self.on, remote_functions.create, made)

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: RRef[nn.Module]) -> Self:
        """A RemoteModule for a module that exists, from its place and a reference to it."""
        name, device = parse_remote_device(remote_device)
        worker = get_worker_info(name).name
        if not isinstance(module_rref, RRef):
            raise UsageError(f"a {type(module_rref).__name__} is no reference to a module")
        if module_rref.owner_name() != worker:
            raise UsageError(
                f"a RemoteModule on {worker} was made of a reference to a value of "
                f"{module_rref.owner_name()}",
                hint="name the worker that owns the module",
            )
        return cls._from_parts(worker, device, True, module_rref)

    # -- run it

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run its forward on its worker. Tensors go to its device, and come back on the CPU."""
        return self._ask(remote_functions.forward, self.device, *args, **kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        """Like `forward`, but returns a future at once."""
        rref, func = self.module_rref, remote_functions.forward
        what, args = f"{self._class_name}.forward", (rref, self.device, *args)
        return call_as(what, Calls.call_async, rref.owner(), func, args, kwargs)

    def _ask(self, func: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        rref = self.module_rref
        what = f"{self._class_name}.{func.__name__}"
        return call_as(what, Calls.call, rref.owner(), func, (rref._lent(), *args), kwargs)

    # -- its parts

    def get_module_rref(self) -> RRef[nn.Module]:
        """A reference to the module itself."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to its parameters, as an optimizer for several workers takes them."""
        return [rref for _, rref in self._ask(remote_functions.named_parameters, "", recurse, True)]

    def parameters(self, recurse: bool = True) -> Iterator[RRef[nn.Parameter]]:  # type: ignore[override]
        """The same as an iterator."""
        return iter(self.remote_parameters(recurse))

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[nn.Parameter]]]:
        """References to its parameters, with their names."""
        return iter(self._ask(remote_functions.named_parameters, prefix, recurse, remove_duplicate))

    def buffers(self, recurse: bool = True) -> Iterator[RRef[torch.Tensor]]:  # type: ignore[override]
        """References to its buffers."""
        return iter([rref for _, rref in self.named_buffers(recurse=recurse)])

    def named_buffers(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[torch.Tensor]]]:
        """References to its buffers, with their names."""
        return iter(self._ask(remote_functions.named_buffers, prefix, recurse, remove_duplicate))

    # -- its mode

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module there. `training` is what was last set through this object."""
        self._ask(remote_functions.train, mode)
        self.training = mode
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set `requires_grad` of its parameters there."""
        self._ask(remote_functions.require_grad, requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad` of its parameters there."""
        self._ask(remote_functions.zero_grad, set_to_none)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply a function that is exposed on its worker to it and all modules in it."""
        self._ask(remote_functions.apply, fn)
        return self

    # -- its state

    def state_dict(  # type: ignore[override]
        self, *, destination: State | None = None, prefix: str = "", keep_vars: bool = False
    ) -> State:
        """A copy of its state."""
        state: State = self._ask(remote_functions.state_dict, self.device, prefix, keep_vars)
        if destination is None:
            return state
        destination.update(state)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(state._metadata)  # type: ignore[attr-defined]
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Copy a state into the module there."""
        state = _detached(state_dict, getattr(state_dict, "_metadata", None))
        keys = self._ask(remote_functions.load_state_dict, self.device, state, strict, assign)
        return _IncompatibleKeys(*keys)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        _strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load this module's part of the state of a module that contains it."""
        metadata = dict(local_metadata)
        assign = bool(metadata.pop("assign_to_params_buffers", False))
        mine = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        state = _detached(mine, {"": metadata})
        try:
            missing, unexpected = self.load_state_dict(state, strict=False, assign=assign)
        except RemoteError as error:
            error_msgs.append(f"{prefix}: {error.message}")
            return
        missing_keys += [prefix + key for key in missing]
        unexpected_keys += [prefix + key for key in unexpected]

    # -- not supported; more methods are refused below

    def _apply(self, _fn: Callable[..., Any], _recurse: bool = True) -> Self:
        """Do nothing when a module that contains this one is moved."""
        return self

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
        if isinstance(value, nn.Parameter | nn.Module):
            self._refuse(f"{name} = …", _MADE_THERE)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> NoReturn:
        where = f"{self.__dict__.get('on')}/{self.__dict__.get('device')}"
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r} here: "
            f"the module itself is on {where}\n"
            f"hint: read it there, in an exposed function that takes get_module_rref()"
        )

    def extra_repr(self) -> str:
        """The worker and the device."""
        return f"on={self.on!r}, device={self.device!r}"

    # -- sent in calls

    def _to_parts(self) -> tuple[object, ...]:
        return self.on, self.device, self.training, self.module_rref

    @classmethod
    def _from_parts(
        cls, on: str, device: str, training: bool, module_rref: RRef[nn.Module]
    ) -> Self:
        kinds = [type(part) for part in (on, device, training)]
        if kinds != [str, str, bool] or not isinstance(module_rref, RRef):
            raise BadMessage(f"a {cls.__name__} came in parts that make none")
        arrived = cls.__new__(cls)
        nn.Module.__init__(arrived)
        arrived.on, arrived.device, arrived.training = on, device, training
        arrived.module_rref = module_rref
        return arrived

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise UsageError(
            "Cannot pickle RemoteModule in python pickler. "
            "RemoteModule can only be pickled when using RPC",
            hint="pass it to rpc_sync, rpc_async or remote; save its state_dict()",
        )

    def _refuse(self, method: str, hint: str) -> NoReturn:
        """Raise the error of a method that is not supported; a subclass may raise another."""
        raise UsageError(
            f"{method} is not for a RemoteModule: the module itself is on {self.on}/{self.device}",
            hint=hint,
        )


_DEVICES = ("to", "to_empty", "cpu", "cuda", "ipu", "xpu", "mtia", "share_memory")
_DTYPES = ("type", "float", "double", "half", "bfloat16")
_PARTS = ("register_parameter", "register_buffer", "add_module", "children", "named_children")
for _name in (*_DEVICES, *_DTYPES, *_PARTS):
    setattr(RemoteModule, _name, _refused(_name, _MADE_THERE if _name in _PARTS else _PLACED))


def _detached(state: Mapping[str, Any], metadata: object) -> State:
    """A copy of a state dict, with its tensors detached from their graphs."""
    plain: State = OrderedDict(
        (key, value.detach() if isinstance(value, torch.Tensor) else value)
        for key, value in state.items()
    )
    if metadata is not None:
        plain._metadata = metadata  # type: ignore[attr-defined]
    return plain


def parse_remote_device(text: str) -> tuple[str | int, str]:
    """The name or number of a worker, which need not exist, and one of its devices."""
    if not isinstance(text, str):
        raise UsageError(f"a {type(text).__name__} names no place for a module", hint=_HINT)
    worker, slash, device = text.partition("/")
    if not worker or "/" in device or (slash and not device):
        raise UsageError(f"{text!r} is not <worker>/<device>", hint=_HINT)
    rank = worker.removeprefix("rank:")
    if rank != worker and not (rank.isascii() and rank.isdecimal()):
        raise UsageError(f"{text!r}: {rank!r} is no number of a worker", hint=_HINT)
    try:
        device = str(torch.device(device or "cpu"))
    except RuntimeError as error:
        raise UsageError(f"{text!r} names no device: {error}", hint=_HINT) from error
    return worker if rank == worker else int(rank), device
