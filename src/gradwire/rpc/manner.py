"""How a worker behaves where torch.distributed.rpc and we differ; `compat` asks for its manner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """The defaults are ours."""

    pickle: bool = False
    """functions, arguments and results travel as pickles, their tensors beside them"""
    edge_per_message: bool = False
    """the tensors of one message cross together, by one edge, instead of each by its own"""
    leaves_outside_contexts: bool = False
    """a tensor that wants a gradient still does so after a crossing that nothing records"""


NATIVE = Manner()
