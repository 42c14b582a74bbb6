"""What the workers of the restarting runs execute. Imported by every process."""

from __future__ import annotations

import contextvars
import os
import signal
from pathlib import Path

import torch

import gradwire
from gradwire import PeerLost, StaleIncarnation
from tests.processes.far import Layer


def here():
    return gradwire.get_worker_info().name, gradwire.incarnation()


def noted(path) -> int:
    """Note that this ran; how often it has so far."""
    with open(path, "ab") as file:
        file.write(b".")
    return Path(path).stat().st_size


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_before(path):
    die()
    noted(path)


def die_after(path):
    noted(path)
    die()


@gradwire.idempotent
def die_at_first(path):
    """The first time it dies after it has run, the second before; the third time it answers."""
    if noted(path) < 3:
        die()
    return here()


def doubled(x):
    return 2 * x


def relayed(to, x):
    return gradwire.rpc_sync(to, doubled, args=(x,))


def fetched(rref):
    return rref.to_here()


def caught(function, *args):
    """The kind and text of what is raised."""
    try:
        value = function(*args)
    except Exception as error:
        kind = next(k for k in (StaleIncarnation, PeerLost, type(error)) if isinstance(error, k))
        return kind.__name__, str(error)
    return "returned", value


def until_back():
    """Wait for all workers, as a step would, outside of any context."""
    return contextvars.Context().run(_until_back)


def _until_back():
    for attempt in gradwire.retrying(times=20):
        with attempt:
            return [gradwire.rpc_sync(name, here) for name in ("w1", "w2")]
    return None


def lose_and_go_on(directory):
    """One incarnation of w1 after the other, and what w0 and w2 see of it."""
    seen = {"at first": until_back()}
    value = gradwire.remote("w1", Layer, args=(3.0,))
    ours = gradwire.RRef(5)
    gradwire.rpc_sync("w2", fetched, (ours,))
    x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    with gradwire.context() as context:
        y = gradwire.rpc_sync("w1", doubled, args=(x,))
        seen["killed"] = caught(gradwire.rpc_sync, "w1", die)
        seen["back"] = until_back()
        seen["old pass"] = caught(gradwire.backward, context, [y])
        seen["old context"] = caught(gradwire.rpc_sync, "w1", doubled, (x,))
        seen["through another"] = caught(gradwire.rpc_sync, "w2", relayed, ("w1", x))
    seen["old reference"] = caught(value.to_here)
    seen["passed on"] = caught(gradwire.rpc_sync, "w2", fetched, (value,))
    seen["method"] = caught(value.rpc_sync().value)
    with gradwire.context() as context:
        y = gradwire.rpc_sync("w1", doubled, (x,)) + gradwire.rpc_sync("w2", relayed, ("w1", x))
        gradwire.backward(context, [y])
        seen["gradient"] = gradwire.get_gradients(context)[x].item()
    seen["new reference"] = gradwire.remote("w1", Layer, args=(4.0,)).rpc_sync().value()
    for how in (die_before, die_after):
        path = f"{directory}/{how.__name__}"
        seen[how.__name__] = caught(gradwire.rpc_sync, "w1", how, (path,))[0]
        seen[f"{how.__name__} back"] = until_back()
        seen[f"{how.__name__} ran"] = len(Path(path).read_bytes()) if Path(path).exists() else 0
    path = f"{directory}/idempotent"
    seen["idempotent"] = gradwire.rpc_sync("w2", die_at_first, (path,))
    seen["idempotent ran"] = len(Path(path).read_bytes())
    return seen


def first_dies():
    """w0 dies with a value of its own; its next incarnation finds those that others have kept."""
    if gradwire.incarnation() == 0:
        gradwire.rpc_sync("w1", keep, (gradwire.incarnation(),))
        die()
    until_back()
    return here(), gradwire.rpc_sync("w1", kept), gradwire.rpc_sync("w2", here)


_kept: list[int] = []


def keep(value):
    _kept.append(value)


def kept():
    return _kept


def lose_one_and_return(path):
    """What is returned does not depend on who is lost last."""
    killed = caught(gradwire.rpc_sync, "w1", die)[0]
    return killed, noted(path)
