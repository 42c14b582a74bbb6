"""What the layers above keep for each worker."""

from __future__ import annotations

import pytest

from gradwire.rpc import worker as worker_module
from gradwire.rpc.worker import part_of_each_worker
from gradwire.testing import cluster


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(worker_module, "_PARTS", [*worker_module._PARTS])


def test_a_registered_part_is_made_once_for_each_worker_before_it_serves():
    made = []

    @part_of_each_worker
    def counted(worker):
        made.append((worker.name, worker.agent.in_flight))
        return len(made)

    with cluster(2) as workers:
        assert made == [("w0", 0), ("w1", 0)]
        assert [member.worker.part(counted) for member in workers] == [1, 2]
    assert len(made) == 2


def test_any_other_part_is_made_when_it_is_asked_for():
    with cluster(1) as workers:
        worker = workers[0].worker
        assert worker.part(repr) is worker.part(repr)
        assert worker.part(repr) == "<Worker w0>"
