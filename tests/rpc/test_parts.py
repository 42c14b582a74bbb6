"""What the layers above keep for each worker."""

from __future__ import annotations

from gradwire.rpc.behavior import Behavior
from gradwire.testing import cluster


def test_a_part_of_the_behavior_is_made_once_for_each_worker_before_it_serves():
    made = []

    def counted(worker):
        made.append((worker.name, worker.agent.in_flight))
        return len(made)

    with cluster(2, behavior=Behavior(parts=(counted,))) as workers:
        assert made == [("w0", 0), ("w1", 0)]
        assert [member.worker.part(counted) for member in workers] == [1, 2]
    assert len(made) == 2


def test_any_other_part_is_made_when_it_is_asked_for():
    with cluster(1) as workers:
        worker = workers[0].worker
        assert worker.part(repr) is worker.part(repr)
        assert worker.part(repr) == "<Worker w0>"
