"""Steps of an optimizer over parameters that live on many workers.

optimizer.py is what users construct; shard.py is the part of it that each owner has.
Read optimizer.py first, then two_phase_commit.py.
"""
