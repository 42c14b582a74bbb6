"""The behavior of torch.distributed.rpc."""

from gradwire.compat.profiles.calls import call_profiled
from gradwire.compat.rpc.all_gather import all_gather
from gradwire.compat.rpc.failures import of_call, of_callback, of_fetch
from gradwire.compat.rpc.internal import _internal_rpc_pickler
from gradwire.compat.rpc.rref_proxy import PyRRef
from gradwire.rpc.behavior import Behavior

TORCH = Behavior(
    pickle=True,
    reducers=_internal_rpc_pickler._class_reducer_dict,
    edge_per_message=True,
    leaves_outside_contexts=True,
    carries_modes=False,
    needs_device_map=True,
    counts_before_use=True,
    answers_when_made=True,
    runs_what_is_late=True,
    reference=PyRRef,
    of_call=of_call,
    of_fetch=of_fetch,
    of_callback=of_callback,
    profiled_call=call_profiled,
    parts=(all_gather,),
)
