"""A sparse tensor, taken apart into dense ones and put together again.

This file knows torch's sparse layouts, not bytes and not headers. The parts may come from a peer:
torch checks every index before the tensor exists, since its operators never do.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")

PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}


def take_apart(tensor: Tensor) -> list[Tensor]:
    """The dense parts of a detached sparse tensor, the values last; no copy."""
    return [getattr(tensor, name)() for name in PARTS[tensor.layout]]


def put_together(
    parts: list[Tensor], shape: tuple[int, ...], layout: torch.layout, coalesced: bool
) -> Tensor:
    """The tensor made of these parts; raises what torch raises when they do not fit."""
    # Devices are named, since torch.set_default_device reaches into every factory.
    if layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, shape, device="cpu", is_coalesced=coalesced, check_invariants=True
        )
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, device="cpu", check_invariants=True
    )
