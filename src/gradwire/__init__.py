"""gradwire: one autograd graph over many machines."""

import importlib
import typing

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.autograd.api import backward, context, get_gradients, live_edges
from gradwire.autograd.graph.edges import LiveEdge
from gradwire.errors import (
    ArgumentTypeError,
    BackwardTimeout,
    BadMessage,
    CallTimeout,
    Cancelled,
    ContextClosed,
    DeadlinePassed,
    GradwireError,
    GraphCutWarning,
    JoinTimeout,
    NotExposed,
    NotSerializable,
    NotTrusted,
    OverLimit,
    PeerError,
    PeerLost,
    RefLeakWarning,
    RemoteError,
    StaleIncarnation,
    StepFailed,
    UnknownWorker,
    UsageError,
    WaitTimeout,
)
from gradwire.launch.interactive import start, stop, workers
from gradwire.launch.run import run
from gradwire.nn.remote_module import RemoteModule
from gradwire.optim.clip import clip_grad_norm_
from gradwire.optim.optimizer import DistributedOptimizer
from gradwire.options import Limits, Options, Timeouts, Tls
from gradwire.rpc.actors.actor import Actor
from gradwire.rpc.actors.lookup import actor, lookup
from gradwire.rpc.api import (
    get_worker_info,
    get_worker_infos,
    incarnation,
    init_rpc,
    refusals,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from gradwire.rpc.calls.futures import Future
from gradwire.rpc.calls.several import Waited, as_completed, wait
from gradwire.rpc.codec.named_types import register_codec
from gradwire.rpc.expose.async_execution import async_execution
from gradwire.rpc.expose.registry import expose
from gradwire.rpc.groups.collective import all_gather, barrier
from gradwire.rpc.groups.group import Group, group
from gradwire.rpc.retry import idempotent, retrying
from gradwire.rpc.rref import RRef
from gradwire.rpc.streams.stream import Stream, stream
from gradwire.seeing.graph import graph
from gradwire.seeing.graph_picture import Graph
from gradwire.seeing.page import Page, serve_page
from gradwire.seeing.trace import Trace, span, trace

if typing.TYPE_CHECKING:
    from gradwire import compat as compat
    from gradwire import ray as ray
    from gradwire import testing as testing
    from gradwire.seeing import metrics as metrics
    from gradwire.seeing import otel as otel

__version__ = "0.1.0.dev0"

__all__ = [  # in the order one learns them
    # begin and end
    "run",
    "workers",
    "start",
    "stop",
    "init_rpc",
    "shutdown",
    "Options",
    "Timeouts",
    "Limits",
    "Tls",
    # run something elsewhere
    "rpc_sync",
    "rpc_async",
    "Future",
    "group",
    "Group",
    "barrier",
    "all_gather",
    "as_completed",
    "wait",
    "Waited",
    "async_execution",
    "stream",
    "Stream",
    "expose",
    "register_codec",
    "get_worker_info",
    "get_worker_infos",
    "WorkerInfo",
    "refusals",
    # keep something elsewhere
    "remote",
    "RRef",
    "actor",
    "Actor",
    "lookup",
    "RemoteModule",
    # differentiate through all of it
    "context",
    "backward",
    "get_gradients",
    "live_edges",
    "LiveEdge",
    # learn from it
    "DistributedOptimizer",
    "clip_grad_norm_",
    # see what it does
    "graph",
    "Graph",
    "trace",
    "Trace",
    "span",
    "serve_page",
    "Page",
    # continue after the loss of a worker
    "retrying",
    "idempotent",
    "incarnation",
    # what can go wrong
    "GradwireError",
    "UsageError",
    "UnknownWorker",
    "NotExposed",
    "NotTrusted",
    "ArgumentTypeError",
    "NotSerializable",
    "ContextClosed",
    "PeerError",
    "PeerLost",
    "StaleIncarnation",
    "BadMessage",
    "OverLimit",
    "DeadlinePassed",
    "CallTimeout",
    "WaitTimeout",
    "Cancelled",
    "BackwardTimeout",
    "JoinTimeout",
    "StepFailed",
    "RemoteError",
    "GraphCutWarning",
    "RefLeakWarning",
]


def __getattr__(name: str) -> typing.Any:  # noqa: ANN401
    """Import `gradwire.testing`, `compat` and others on first use: few programs need them."""
    if name in ("compat", "ray", "testing"):
        return importlib.import_module(f"gradwire.{name}")
    if name in ("metrics", "otel"):
        return importlib.import_module(f"gradwire.seeing.{name}")
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
