"""DistributedOptimizer under its name in torch.distributed.optim."""

from gradwire.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
