"""What a worker still holds when it should hold nothing."""

from __future__ import annotations

from dataclasses import asdict

from gradwire.rpc.worker import Worker


def leaks(worker: Worker) -> list[str]:
    """Each table that is not empty, for people."""
    found = {
        "contexts": len(worker.engine.contexts),
        "passes": len(worker.engine.passes),
        "calls in flight": worker.agent.in_flight,
        "jobs": worker.agent.dispatch.active,
        **{f"references {name}": n for name, n in asdict(worker.refs.statistics()).items()},
    }
    return [f"{worker.name} still has {n} {what}" for what, n in found.items() if n]
