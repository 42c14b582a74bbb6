"""A Ray cluster on this machine, until stdin ends: python -m tests.ray.raylets 2 2.

One raylet for each number, with so many CPUs. Reads commands, and answers with lines `said …`.
"""

from __future__ import annotations

import sys

import ray
from ray.cluster_utils import Cluster

DEAD_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 10,
}


def left(address: str) -> str:
    """Actors and placement groups that are not gone."""
    ray.init(address, log_to_driver=False)
    try:
        actors = [a["State"] for a in ray._private.state.actors().values()]
        groups = [g["state"] for g in ray.util.placement_group_table().values()]
    finally:
        ray.shutdown()
    return str([s for s in actors if s != "DEAD"] + [s for s in groups if s != "REMOVED"])


def main() -> None:
    first, *others = map(int, sys.argv[1:])
    memory = {"object_store_memory": 100_000_000}
    head = {"num_cpus": first, "num_gpus": 2, "_system_config": DEAD_SOON, **memory}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for cpus in others:
        cluster.add_node(num_cpus=cpus, **memory)
    cluster.wait_for_nodes()
    print("said", cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["left"]:
                print("said", left(cluster.address), flush=True)
            case ["add", cpus]:
                cluster.add_node(num_cpus=int(cpus), **memory)
                print("said added", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
