"""What is sent: a function with its arguments, pickled, and how it is run where it arrives."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from gradwire.autograd.scope import current_context
from gradwire.compat.rpc import api
from gradwire.compat.rpc.rref_proxy import PyRRef, beside
from gradwire.current import current_worker
from gradwire.errors import UsageError
from gradwire.rpc.codec.pickle_codec import PickleCodec, Reducers
from gradwire.rpc.expose.async_execution import result_of
from gradwire.rpc.graph_cut import warn_of_cut

_NO_AGENT = "Current RPC agent is not set"  # TorchScript's words


class RPCExecMode(Enum):
    """The kinds of calls, as profiles name them."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function of the user's, with its arguments."""

    func: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object] | None


class RemoteException(NamedTuple):
    """What a function raised, as data."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler:
    """Pickles with tensors beside; programs derive their own picklers from it."""

    def __init__(self) -> None:
        self._class_reducer_dict: dict[type, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        self._class_reducer_dict.setdefault(obj_class, reducer)

    def serialize(self, obj: object) -> tuple[bytes, list[torch.Tensor]]:
        """The value as bytes and tensors."""
        data, tensors, copies = _codec(self._class_reducer_dict).encode(obj)
        if copies and torch.is_grad_enabled() and current_context() is not None:
            warn_of_cut(0, "what was serialized", copies)
        return data, tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> object:
        """The value that was serialized."""
        return _codec({}).decode(binary_data, tensor_table)


def _codec(reducers: Reducers) -> PickleCodec:
    codec = PickleCodec(reducers, restores_parameters=True)
    codec.extend(PyRRef, 0, PyRRef._serialize, PyRRef._deserialize)
    return codec


_internal_rpc_pickler = _InternalRPCPickler()
serialize, deserialize = _internal_rpc_pickler.serialize, _internal_rpc_pickler.deserialize


def run_function(udf: PythonUDF) -> object:
    """Run a function that a peer sent. What it raises is also printed here."""
    try:
        return result_of(udf.func, *udf.args, **(udf.kwargs or {}))
    except Exception as raised:
        error = raised
        if isinstance(raised, RuntimeError) and _NO_AGENT in str(raised):
            error = UsageError(
                "TorchScript code called rpc_sync, rpc_async or remote, or used an RRef, which "
                "gradwire does not have",
                hint="make these calls from Python; what they call may be TorchScript",
            )
        me = current_worker.find().directory.me
        print(f"On {me}:\n{error!r}\n{traceback.format_exc()}", file=sys.stderr)
        if error is raised:
            raise
        raise error from raised


def run_builtin(operator: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run an operator of torch, as `aten::name`; its overload is chosen by the arguments."""
    space, _, name = operator.partition("::")
    return getattr(getattr(torch.ops, space), name)(*args, **kwargs)


def run_serialized(
    binary_data: bytes, tensor_table: list[torch.Tensor], references: list[PyRRef[Any]]
) -> object:
    """Run a function that a pickler of the program's own has packed."""
    with beside(references):
        udf = api._default_pickler.deserialize(binary_data, tensor_table)
    assert isinstance(udf, PythonUDF)
    return run_function(udf)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
