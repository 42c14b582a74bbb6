"""The torch.distributed.rpc names, served by gradwire, so that programs written for them run as is.

    python -m gradwire.compat train.py --epochs 3
    python -m gradwire.compat -m torch.distributed.run --nproc-per-node 2 train.py

runs an unmodified program, and whatever Python it starts, with gradwire in the place of torch's
RPC, distributed autograd, DistributedOptimizer and RemoteModule. A program that may be changed
calls `install()` before it imports any of them.
"""

from gradwire.compat.substitution import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
