"""What the processes of tests/mates.py find imported: all that a training step would import."""

from __future__ import annotations

import gc

import torch._dynamo  # which the first optimizer of a process imports
import torch.fx.experimental.symbolic_shapes  # noqa: F401  # likewise the first backward

import tests.kills.far
import tests.mayhem.far  # noqa: F401

gc.freeze()  # a process that looks for what it has left looks at what is its own
