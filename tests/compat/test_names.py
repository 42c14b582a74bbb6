"""The names in the modules that stand for torch's: all of torch's, or a reason why not.

A name counts if torch defines it in one of the modules that are replaced; what a module of torch's
has merely imported from elsewhere is not its own.
"""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gradwire.compat.rpc import api
from gradwire.compat.substitution import MODULES, PARTS
from tests.conformance.suites import FAULTY

ROOT = Path(__file__).parents[2]
RPC = "torch.distributed.rpc"
ALL = MODULES | FAULTY

INSIDES = (
    "a step, a table or a lock of torch's implementation: here the core does this in its own way"
)
CPP = "how torch's Python and its C++ agent call each other: there is no such agent here"
SCRIPT = "for RPC from inside of TorchScript, and for modules with an interface: neither is here"
TYPING = "a type variable, or what a loop that writes documentation has left behind"
PROFILER = "turns profiling on in torch's agent; here the class of the profile itself does so"

OMITTED = {
    RPC: {
        INSIDES: "_init_counter _validate_rpc_args _destroy_rref_context "
        "_cleanup_python_rpc_handler _TensorPipeRpcBackendOptionsBase",
        CPP: "_invoke_remote_builtin _invoke_remote_python_udf _invoke_rpc_builtin "
        "_invoke_rpc_python_udf",
        SCRIPT: "_invoke_remote_torchscript _invoke_rpc_torchscript _enable_jit_rref_pickle "
        "_disable_jit_rref_pickle",
        TYPING: "method_factory new_method",
        PROFILER: "RemoteProfilerManager _set_profiler_node_id "
        "_enable_server_process_global_profiler _disable_server_process_global_profiler",
    },
    f"{RPC}._utils": {INSIDES: "_group_membership_management _update_group_membership"},
    f"{RPC}.internal": {
        CPP: "_handle_exception _run_function _start_record_function _get_current_rpc_agent"
    },
    f"{RPC}.options": {
        INSIDES: "_to_device _to_device_list _to_device_map _TensorPipeRpcBackendOptionsBase "
        "_is_tensorpipe_available"
    },
    f"{RPC}.backend_registry": {
        INSIDES: "_backend_type_doc _backend_type_repr _create_device_list "
        "_create_reverse_mapping _get_device_infos "
        "_init_process_group _set_devices_and_reverse_device_map "
        "_tensorpipe_construct_rpc_backend_options_handler "
        "_tensorpipe_exchange_and_check_all_device_maps _tensorpipe_init_backend_handler "
        "_tensorpipe_validate_devices _validate_device_maps"
    },
    f"{RPC}.rref_proxy": {INSIDES: "_invoke_rpc _local_invoke _local_invoke_async_execution"},
    f"{RPC}.api": {
        INSIDES: "_all_gather_sequence_id _all_gather_sequence_id_to_states "
        "_destroy_rref_context _cleanup_python_rpc_handler "
        "_invoke_rpc",
        CPP: "_invoke_remote_builtin _invoke_remote_python_udf _invoke_rpc_builtin "
        "_invoke_rpc_python_udf",
        SCRIPT: "_invoke_remote_torchscript _invoke_rpc_torchscript",
        TYPING: "T _P _R docstring method method_factory new_method",
        PROFILER: "RemoteProfilerManager _enable_rpc_profiler _get_should_profile",
    },
    f"{RPC}.server_process_global_profiler": {
        PROFILER: "_enable_server_process_global_profiler _disable_server_process_global_profiler"
    },
    f"{RPC}._testing.faulty_agent_backend_registry": {
        INSIDES: "_faulty_tensorpipe_construct_rpc_backend_options_handler "
        "_faulty_tensorpipe_init_backend_handler"
    },
    "torch.distributed.optim.optimizer": {
        INSIDES: "_LocalOptimizer _local_optimizer_step _new_local_optimizer _wait_for_all",
        SCRIPT: "_ScriptLocalOptimizer _ScriptLocalOptimizerInterface _new_script_local_optimizer "
        "_script_local_optimizer_step functional_optim_map",
    },
    "torch.distributed.nn.api.remote_module": {
        INSIDES: "_param_rrefs _raise_not_supported _remote_module_receiver "
        "_remote_module_reducer _REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING "
        "_SerializedRemoteModule",
        SCRIPT: "_create_module_with_interface "
        "_instantiate_template _recursive_script_module_receiver "
        "_recursive_script_module_reducer",
        TYPING: "T",
    },
}


def own_names(module: ModuleType) -> set[str]:
    names = {name for name in dir(module) if not name.startswith("__")} - {"TYPE_CHECKING"}
    declared = set(getattr(module, "__all__", ()))
    return {name for name in names if name in declared or is_of(module, getattr(module, name))}


def is_of(module: ModuleType, value: object) -> bool:
    if isinstance(value, ModuleType | logging.Logger):
        return False
    home = getattr(value, "__module__", None)
    if not isinstance(home, str):
        return True  # a number, a text, a table
    return home == module.__name__ or home in PARTS


def report() -> None:
    """Print, for each module, torch's names that ours lacks, and the omitted ones that it has."""
    found = {}
    for name, omitted in ((name, names_omitted(name)) for name in ALL):
        theirs, ours = importlib.import_module(name), importlib.import_module(ALL[name])
        missing = {one for one in own_names(theirs) if not hasattr(ours, one)}
        found[name] = [sorted(missing), sorted(one for one in omitted if hasattr(ours, one))]
    print(json.dumps(found))


def names_omitted(name: str) -> set[str]:
    return {one for names in OMITTED.get(name, {}).values() for one in names.split()}


@pytest.fixture(scope="module")
def reported():
    """From a process of its own: torch's test agent cannot be imported twice, nor undone."""
    line = f"from {__name__} import report; report()"
    run = [sys.executable, "-W", "ignore", "-c", line]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ALL)
def test_a_module_has_all_names_of_the_one_it_stands_for_but_for_those_with_a_reason(
    reported, name
):
    missing, there_after_all = reported[name]

    assert set(missing) <= names_omitted(name)
    assert there_after_all == [], "no reason is needed"


def test_every_submodule_is_reached_from_its_package():
    for name, ours in MODULES.items():
        package, _, last = name.rpartition(".")
        if package in MODULES:
            importlib.import_module(ours)
            assert getattr(sys.modules[MODULES[package]], last) is sys.modules[ours]


def test_programs_that_gather_by_themselves_find_what_they_take():
    states = api.AllGatherStates()

    assert (states.gathered_objects, states.proceed_signal.is_set()) == ({}, False)
