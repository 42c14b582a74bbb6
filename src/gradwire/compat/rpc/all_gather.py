"""The all-gathers of a worker under compat: a lost worker is waited for if it can be reached."""

from __future__ import annotations

from gradwire.rpc.groups.all_gather import AllGather
from gradwire.rpc.groups.all_gather_state import Rounds
from gradwire.rpc.worker import Worker


def all_gather(worker: Worker) -> AllGather:
    """The all-gathers of a worker. From its start: a worker lost before the first one counts."""
    agent, directory, seconds = worker.agent, worker.directory, worker.options.timeouts.connect

    def reach(name: str) -> None:
        agent.reach(directory.find(name).id, agent.clock.now() + seconds)

    def present() -> list[str]:
        return [info.name for info in directory.all()]

    gathers = AllGather(worker.name, agent.clock, reach, present)
    agent.on_peer_lost(lambda lost, _: gathers.note(Rounds.lost, directory.name(lost)))
    return gathers
