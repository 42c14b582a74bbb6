"""DistributedOptimizer: steps parameters that live on many workers, all or none of them.

optimizer.py is what users construct; shard.py is its part on each owner of parameters.
Read optimizer.py first, then two_phase_commit.py.
"""
