"""The place that a launcher gave this process: its rank, the world size, and where workers meet.

One row for each launcher: the variables that tell that it has started this process, and where the
place is in them. The environment is an argument, so a test needs no launcher. Rows come in the
order in which they are tried: torchrun is often started by srun, and both in a pod of Kubernetes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gradwire.errors import UsageError

Environment = Mapping[str, str]

LAUNCHER_VARIABLE = "GRADWIRE_LAUNCHER"
"""Names the row to use, or "none". Without it, the first row that fits."""
_DEFAULT_PORT = 29500
_SLURM_PORTS = range(61440, 65536)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Place(NamedTuple):
    """Which worker of which job this process is."""

    launcher: str
    rank: int
    world_size: int
    init_method: str
    is_one_machine: bool
    """whether it is known that all processes of the job run on one machine"""


class Row(NamedTuple):
    """How one launcher tells processes their places."""

    signs: tuple[str, ...]
    """the variables that are set in processes that it has started"""
    is_certain: bool
    """whether they mean that this process is one of several. Other programs may set them for other
    reasons, or leave them to their children; then a job of one process does not count
    """
    place: Callable[[Environment], Place]


def place_in(environment: Environment) -> Place | None:
    """The place that a launcher gave this process; None if no launcher has started it."""
    asked = environment.get(LAUNCHER_VARIABLE, "")
    if asked == "none":
        return None
    if asked:
        return _place_by(asked, environment)
    for row in LAUNCHERS.values():
        if all(environment.get(sign) for sign in row.signs):
            place = row.place(environment)
            if row.is_certain or place.world_size > 1:
                return place
    return None


def _place_by(launcher: str, environment: Environment) -> Place:
    row = LAUNCHERS.get(launcher)
    if row is None:
        raise UsageError(
            f"{LAUNCHER_VARIABLE}={launcher!r} is no launcher that gradwire knows",
            hint=f"one of {', '.join(LAUNCHERS)}, or none",
        )
    missing = [sign for sign in row.signs if not environment.get(sign)]
    if missing:
        raise UsageError(
            f"{LAUNCHER_VARIABLE}={launcher}, but {', '.join(missing)} is not set",
            hint=f"start this process by {launcher}, or unset {LAUNCHER_VARIABLE}",
        )
    return row.place(environment)


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it: `n[003-005,9],login` begins with `n003`."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.split(",", 1)[0]
    ranges, _, suffix = rest.partition("]")
    return prefix + ranges.split(",", 1)[0].split("-", 1)[0] + suffix.split(",", 1)[0]


def _torchrun(environment: Environment) -> Place:
    size = _number(environment, "WORLD_SIZE")
    is_one = environment.get("LOCAL_WORLD_SIZE") == str(size)
    return Place("torchrun", _number(environment, "RANK"), size, "env://", is_one)


def _slurm(environment: Environment) -> Place:
    rank = _number(environment, "SLURM_PROCID")
    is_one = environment.get("SLURM_STEP_NUM_NODES") == "1"
    # Slurm knows nodes by names that need not resolve. One node needs none.
    host = "127.0.0.1" if is_one else first_host(environment["SLURM_STEP_NODELIST"])
    if rank == 0 and environment.get("SLURM_NODEID", "0") != "0":
        _check_elsewhere(environment, host)
    # Steps of one job may run on one node at once, each with a rendezvous of its own.
    step = f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}"
    port = _SLURM_PORTS[zlib.crc32(step.encode()) % len(_SLURM_PORTS)]
    size = _number(environment, "SLURM_STEP_NUM_TASKS")
    return Place("slurm", rank, size, _meeting(environment, host, port), is_one)


def _check_elsewhere(environment: Environment, host: str) -> None:
    """Raise UsageError if all would wait for rank 0 at the first node, and it runs on another."""
    if not environment.get("MASTER_ADDR"):
        node = environment.get("SLURMD_NODENAME", "another node")
        raise UsageError(
            f"the task of rank 0 runs on {node}, and workers would meet on {host}, the first node",
            hint=f"set MASTER_ADDR={node} for every task, or give up srun --distribution=arbitrary",
        )


def _leader_worker_set(environment: Environment) -> Place:
    return Place(
        "lws",
        _number(environment, "LWS_WORKER_INDEX"),
        _number(environment, "LWS_GROUP_SIZE"),
        _meeting(environment, environment["LWS_LEADER_ADDRESS"]),
        is_one_machine=False,
    )


def _indexed_job(environment: Environment) -> Place:
    rank = _number(environment, "JOB_COMPLETION_INDEX")
    meeting = _meeting(environment, environment["MASTER_ADDR"])
    return Place("job", rank, _number(environment, "WORLD_SIZE"), meeting, is_one_machine=False)


def _plain(environment: Environment) -> Place:
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    return Place("env", rank, size, "env://", environment["MASTER_ADDR"] in _LOOPBACK)


LAUNCHERS: dict[str, Row] = {
    "torchrun": Row(("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"), True, _torchrun),
    "lws": Row(
        ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"), True, _leader_worker_set
    ),
    "job": Row(("JOB_COMPLETION_INDEX", "WORLD_SIZE", "MASTER_ADDR"), True, _indexed_job),
    # A batch script has SLURM_PROCID too; only a step of srun has the number of its tasks.
    "slurm": Row(
        ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_PROCID"),
        False,
        _slurm,
    ),
    "env": Row(("RANK", "WORLD_SIZE", "MASTER_ADDR"), False, _plain),
}


def _meeting(environment: Environment, host: str, port: int = _DEFAULT_PORT) -> str:
    """Where workers meet, by default at a host that the launcher names."""
    host = environment.get("MASTER_ADDR") or host
    bracketed = f"[{host}]" if ":" in host else host
    return f"tcp://{bracketed}:{environment.get('MASTER_PORT') or port}"


def _number(environment: Environment, name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"the environment variable {name}={text!r} is not a number")
    return int(text)
