"""The arguments of torch's `init_rpc` that ours has for programs that move over, as `Options`.

What has a clear meaning here is taken over; the rest is refused, with the way to say it here.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

from gradwire.errors import UsageError
from gradwire.options import Options, Timeouts

_BACKENDS = ("TENSORPIPE", None)
_FOR_EVER = 86400.0
"""What a timeout of 0 becomes, as under compat; in torch it means no deadline."""


def options_for(backend: object, given: Any, options: Options | None) -> Options:  # noqa: ANN401
    """The options of a worker that was given torch's, or ours, or none."""
    name = getattr(backend, "name", backend)
    if name not in _BACKENDS:
        raise UsageError(
            f"init_rpc has no backend {name!r:.80}: there is one, and nothing to choose",
            hint="leave backend= out; how workers reach each other is Options(listen=…, tls=…)",
        )
    if given is None:
        return options or Options()
    if options is not None:
        raise UsageError(
            "init_rpc was given options= and rpc_backend_options=, which say the same things",
            hint="pass options=gradwire.Options(…) alone",
        )
    return _translated(given)


def checked_rank(rank: object) -> int | None:
    """The rank that was given; torch's default, -1, is none."""
    if rank is None or rank == -1:
        return None
    if not isinstance(rank, Integral):
        raise UsageError(
            f"init_rpc was given rank={rank!r:.80}, which is not a number",
            hint="it is init_rpc(name, rank, world_size, options); torch's second argument, the "
            "backend, may be given as backend=…",
        )
    return int(rank)


def _translated(given: Any) -> Options:  # noqa: ANN401
    if not hasattr(given, "rpc_timeout") or not hasattr(given, "init_method"):
        raise UsageError(
            f"rpc_backend_options= takes the options of torch.distributed.rpc, not a "
            f"{type(given).__name__}",
            hint="pass options=gradwire.Options(…)",
        )
    if getattr(given, "device_maps", None):
        raise UsageError(
            "rpc_backend_options= has device maps, which native calls do not use",
            hint="a tensor arrives on the device of the same name: move it there before the call, "
            "or use RemoteModule('w1/cuda:0', …); programs under gradwire.compat keep their maps",
        )
    return Options(
        init_method=given.init_method,
        threads=max(1, getattr(given, "num_worker_threads", Options().threads)),
        timeouts=Timeouts(call=float(given.rpc_timeout) or _FOR_EVER),
    )
