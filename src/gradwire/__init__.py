"""gradwire: one autograd graph over many machines."""

from gradwire.agent.directory import WorkerInfo
from gradwire.autograd.api import backward, context, get_gradients
from gradwire.options import Limits, Options, Timeouts
from gradwire.rpc.api import (
    get_worker_info,
    init_rpc,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from gradwire.rpc.futures import Future
from gradwire.rpc.registry import expose
from gradwire.rpc.rref import RRef
