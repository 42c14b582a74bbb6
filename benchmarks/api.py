"""The calls of both libraries under common names, so that one program measures both."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TORCH, GRADWIRE = "torch.distributed.rpc", "gradwire"
SIDES = (TORCH, GRADWIRE)


@dataclass(frozen=True)
class Api:
    """The functions that a program calls, and how a worker of this side starts and ends."""

    begin: Callable[..., None]
    end: Callable[[], None]
    rpc_sync: Callable[..., Any]
    rpc_async: Callable[..., Any]
    remote: Callable[..., Any]
    RRef: Callable[..., Any]
    context: Callable[..., Any]
    backward: Callable[..., Any]
    get_gradients: Callable[..., Any]
    optimizer: Callable[..., Any]
    needs_context: bool
    """whether a graph crosses workers only inside a context"""


def secret_beside(place: str) -> Path:
    """The file with the secret of the workers of this rendezvous."""
    return Path(place).with_name("secret")


def load(side: str) -> Api:
    """Import this side only."""
    return _torch() if side == TORCH else _gradwire()


def _torch() -> Api:
    import torch
    from torch.distributed import autograd, rpc

    def begin(rank: int, size: int, place: str, *, tcp: bool, exposed: list) -> None:
        ways = {"_transports": ["uv"], "_channels": ["basic"]} if tcp else {}
        maps = {}
        if torch.cuda.is_available() and not tcp:
            maps = {f"w{n}": {0: 0} for n in range(size) if n != rank}
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{place}", device_maps=maps, **ways
        )
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)

    def optimizer(*args: Any, **settings: Any) -> Any:
        with warnings.catch_warnings():  # it warns that it uses TorchScript
            warnings.simplefilter("ignore")
            from torch.distributed.optim import DistributedOptimizer

            return DistributedOptimizer(*args, **settings)

    return Api(
        begin=begin,
        end=rpc.shutdown,
        rpc_sync=rpc.rpc_sync,
        rpc_async=rpc.rpc_async,
        remote=rpc.remote,
        RRef=rpc.RRef,
        context=autograd.context,
        backward=autograd.backward,
        get_gradients=autograd.get_gradients,
        optimizer=optimizer,
        needs_context=True,
    )


def certificates_beside(place: str) -> Path:
    """The folder with the certificates of the workers of this rendezvous, if they use TLS."""
    return Path(place).with_name("certificates")


def checksum_beside(place: str) -> Path:
    """A file that exists if tensors have checksums."""
    return Path(place).with_name("checksum")


def _gradwire() -> Api:
    import gradwire

    def begin(rank: int, size: int, place: str, *, tcp: bool, exposed: list) -> None:
        listen = "tcp://127.0.0.1:0" if tcp else "unix"
        tls, secret = _tls(place, f"w{rank}"), str(secret_beside(place))
        options = gradwire.Options(
            init_method=f"file://{place}",
            listen=listen,
            tls=tls,
            secret=secret,
            checksum=checksum_beside(place).exists(),
        )
        gradwire.init_rpc(f"w{rank}", rank, size, options, expose=exposed)

    return Api(
        begin=begin,
        end=gradwire.shutdown,
        rpc_sync=gradwire.rpc_sync,
        rpc_async=gradwire.rpc_async,
        remote=gradwire.remote,
        RRef=gradwire.RRef,
        context=gradwire.context,
        backward=gradwire.backward,
        get_gradients=gradwire.get_gradients,
        optimizer=gradwire.DistributedOptimizer,
        needs_context=False,
    )


def _tls(place: str, worker: str) -> Any:
    if not certificates_beside(place).exists():
        return None
    from gradwire.launch.certs import Folder

    return Folder(certificates_beside(place)).tls(worker)


@dataclass
class _Here:
    api: Api | None = None


_HERE = _Here()


def settle(api: Api) -> None:
    """Make this process a worker of that side."""
    _HERE.api = api


def here() -> Api:
    """The side of this worker process; for functions that peers run here."""
    assert _HERE.api is not None, "only in a worker process of benchmarks.sides"
    return _HERE.api
