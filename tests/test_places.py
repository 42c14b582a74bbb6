"""What launchers tell the processes that they start: one row each, with recorded environments."""

from __future__ import annotations

import pytest

from gradwire.errors import UsageError
from gradwire.places import LAUNCHERS, Place, first_host, place_in

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29400",
}
# Slurm 22.05. The names are compared with those of a real step by slurm/test_slurm.py.
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu004",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
ONE_NODE = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu004"}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "gpu003",
    "SLURM_NTASKS": "4",
}
INTERACTIVE = {  # the shell of salloc
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "gpu003",
}
ELSEWHERE = {"SLURM_PROCID": "0"}  # --distribution=arbitrary: rank 0 on the second node
LWS = {
    "LWS_LEADER_ADDRESS": "run-0.run.default",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "1",
}
JOB = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "train-0.train"}
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN, Place("torchrun", 2, 3, "env://", True)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, Place("torchrun", 2, 3, "env://", False)),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, Place("torchrun", 0, 1, "env://", False)),
        (TORCHRUN | SRUN, Place("torchrun", 2, 3, "env://", True)),
        (SRUN, Place("slurm", 3, 4, "tcp://gpu003:62865", False)),
        (SRUN | ONE_NODE, Place("slurm", 3, 4, "tcp://127.0.0.1:62865", True)),
        (SRUN | ELSEWHERE | {"MASTER_ADDR": "b"}, Place("slurm", 0, 4, "tcp://b:62865", False)),
        (SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "1"}, Place("slurm", 3, 4, "tcp://b:1", False)),
        (LWS, Place("lws", 1, 4, "tcp://run-0.run.default:29500", False)),
        (LWS | {"MASTER_PORT": "7"}, Place("lws", 1, 4, "tcp://run-0.run.default:7", False)),
        (JOB, Place("job", 1, 2, "tcp://train-0.train:29500", False)),
        (JOB | {"MASTER_ADDR": "fd00::1"}, Place("job", 1, 2, "tcp://[fd00::1]:29500", False)),
        (PLAIN, Place("env", 1, 2, "env://", True)),
        (PLAIN | {"MASTER_ADDR": "10.0.0.1"}, Place("env", 1, 2, "env://", False)),
        (TORCHRUN | {"GRADWIRE_LAUNCHER": "env"}, Place("env", 2, 3, "env://", False)),
    ],
)
def test_each_launcher_gives_a_place(environment, place):
    assert place_in(environment) == place


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH_SCRIPT,  # or each program in a batch script would take itself for a worker
        INTERACTIVE,
        PLAIN | {"WORLD_SIZE": "1"},
        {"RANK": "1", "WORLD_SIZE": "2"},  # nobody says where to meet
        TORCHRUN | {"GRADWIRE_LAUNCHER": "none"},
    ],
)
def test_a_process_that_no_launcher_started_has_no_place(environment):
    assert place_in(environment) is None


def test_two_steps_of_a_slurm_job_meet_at_two_ports():
    first, second = (place_in(SRUN | {"SLURM_STEP_ID": step}).init_method for step in "01")
    assert first != second


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[003-005,9],login", "n003"),
        ("n[3]", "n3"),
        ("a,n[1-2]", "a"),
        ("rack[1-2]-node,b", "rack1-node"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes, host):
    assert first_host(nodes) == host


def test_a_launcher_that_is_named_and_did_not_start_the_process_is_an_error():
    with pytest.raises(UsageError, match=r"GRADWIRE_LAUNCHER=slurm, but SLURM_STEP_ID, SLURM_STEP"):
        place_in({"GRADWIRE_LAUNCHER": "slurm"})
    with pytest.raises(UsageError, match="'pbs' is no launcher that gradwire knows") as error:
        place_in({"GRADWIRE_LAUNCHER": "pbs"})
    assert all(name in error.value.hint for name in LAUNCHERS)


def test_rank_0_is_not_awaited_on_a_node_of_slurm_where_it_does_not_run():
    with pytest.raises(
        UsageError, match=r"rank 0 runs on gpu004, .* would meet on gpu003"
    ) as error:
        place_in(SRUN | ELSEWHERE)
    assert "MASTER_ADDR=gpu004" in error.value.hint


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(UsageError, match="the environment variable RANK='x' is not a number"):
        place_in(TORCHRUN | {"RANK": "x"})
