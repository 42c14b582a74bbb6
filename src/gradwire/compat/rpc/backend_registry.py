"""The kinds of backend that `init_rpc` knows, by name; programs may add their own.

`BackendType` is one class for good: a member stays a member when others are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import getitem
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.compat.rpc import api, constants
from gradwire.compat.rpc.agent import TensorPipeAgent
from gradwire.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """How a backend makes its options, and how it begins."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class _Members(type):
    """What an enum offers, for a class that grows. The latest member comes first."""

    _known: dict[str, Any]

    @property
    def __members__(cls) -> Mapping[str, Any]:
        return MappingProxyType(cls._known)

    def __getitem__(cls, name: str) -> Any:  # noqa: ANN401
        return cls._known[name]

    def __getattr__(cls, name: str) -> Any:  # noqa: ANN401
        try:
            return cls._known[name]
        except KeyError:
            raise AttributeError(f"no RPC backend is called {name}") from None

    def __iter__(cls) -> Iterator[Any]:
        return iter(list(cls._known.values()))

    def __len__(cls) -> int:
        return len(cls._known)

    def __contains__(cls, member: object) -> bool:
        return isinstance(member, cls)


class BackendType(metaclass=_Members):
    """The registered backends. `BackendType.TENSORPIPE` is the one that is always there."""

    _known: dict[str, Any] = {}  # noqa: RUF012  # the registry of the process

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name, self.value = name, value

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return getitem, (BackendType, self.name)


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of this name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Add a backend: how its options are made, and what makes its agent."""
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    made = BackendType(backend_name, value)
    BackendType._known = {backend_name: made, **BackendType._known}
    return made


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """The options of a backend, from what it takes."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: BackendType, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """The agent of a backend, which has joined."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _our_options(rpc_timeout: float, init_method: str, **more: Any) -> object:  # noqa: ANN401
    known = more.keys() & {"num_worker_threads", "_transports", "_channels"}  # ignoring the rest
    given = {name: more[name] for name in known}
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **given)


def _start_agent(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
    agent_class: type[TensorPipeAgent] = TensorPipeAgent,
) -> TensorPipeAgent:
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    agent = agent_class(store, name, rank, world_size, rpc_backend_options)
    api._init_rpc_states(agent)
    return agent


register_backend("TENSORPIPE", _our_options, _start_agent)
