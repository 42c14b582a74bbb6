"""A profile of everything that peers run in this process."""

from __future__ import annotations

import torch

__all__: list[str] = []


class _server_process_global_profile(torch.autograd.profiler.profile):  # torch's name
    """The profiler of the process: threads that serve are among those it records."""
