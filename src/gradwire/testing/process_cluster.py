"""Workers on real processes, for tests: new ones for each test, on processes that are not.

To start a process takes seconds, to join milliseconds. So hosts are started once for a whole
session, and each test has its own workers on them, over real sockets. Worker w0 is the test's own
process, so that a test is plain code.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import cast

from gradwire.agent.peers.secret import write_secret
from gradwire.current import current_worker
from gradwire.errors import GradwireError
from gradwire.launch.child import AS_LONG_AS_IT_TAKES
from gradwire.launch.plan import Orders, orders_for, secret_in
from gradwire.launch.process_pool import Host, Hosts
from gradwire.options import Options
from gradwire.rpc.api import init_rpc, shutdown
from gradwire.rpc.worker import Exposed

__all__ = ["Host", "Hosts", "process_cluster"]

_LEAVE_SECONDS = 5.0

Warned = list[tuple[type[Warning], str]]


@contextmanager
def process_cluster(
    n: int,
    *,
    expose: Exposed = (),
    options: Options | None = None,
    hosts: Hosts | None = None,
) -> Iterator[Mapping[str, Host]]:
    """This process as worker w0, and n - 1 others on hosts; all have left when the block ends.

    Gives the hosts of the others, by name. What they warn of is warned of here at the end. One that
    is killed in the block is not missed; the next cluster that needs it starts it again.

    >>> with process_cluster(2) as others:
    ...     gradwire.rpc_sync("w1", torch.sin, args=(x,))
    """
    exposed = tuple(expose)
    with ExitStack() as stack:
        hosts = hosts or stack.enter_context(Hosts(n - 1))
        others = {host.name: host for host in hosts.take(n - 1)}
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-test-"))
        options = options or Options()
        if options.secret is None:
            write_secret(secret_in(Path(directory)))
        mine, *theirs = orders_for(n, options, Path(directory))
        for host, orders in zip(others.values(), theirs, strict=True):
            host.begin(_serve, orders, exposed)
        stack.enter_context(_sent_home(others, mine.options))
        init_rpc(mine.name, mine.rank, n, mine.options, expose=exposed)
        try:
            yield others
        finally:
            if current_worker.maybe_default() is not None:  # unless the block itself has left
                shutdown()


def _serve(orders: Orders, expose: Exposed) -> Warned:
    """An inbound request: be a worker until the others are over. What was warned of meanwhile."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        init_rpc(orders.name, orders.rank, orders.world_size, orders.options, expose=expose)
        shutdown(timeout=AS_LONG_AS_IT_TAKES)
    return [(warning.category, str(warning.message)) for warning in warned]


@contextmanager
def _sent_home(others: Mapping[str, Host], options: Options) -> Iterator[None]:
    """Afterwards every host is free again: by itself if all went well, or it is stopped."""
    try:
        yield
    except BaseException:
        # They may wait for what never comes; but one that leaves in order need not start again.
        for host in others.values():
            with suppress(GradwireError):
                _finish(host, _LEAVE_SECONDS)
        raise
    with ExitStack() as all_of_them:  # each is heard, whatever the others say
        for host in others.values():
            all_of_them.callback(_finish, host, options.timeouts.shutdown)


def _finish(host: Host, seconds: float) -> None:
    warned = host.finish(seconds) if host.is_running else []
    for category, text in cast(Warned, warned):
        warnings.warn(f"{host.name}: {text}", category, stacklevel=2)
