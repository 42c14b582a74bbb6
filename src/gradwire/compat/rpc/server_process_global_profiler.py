"""A name that programs import. Torch's own records every thread that serves; ours does not."""

from __future__ import annotations

import torch

__all__: list[str] = []


class _server_process_global_profile(torch.autograd.profiler.profile):  # torch's name
    """Records the thread that enters it."""
