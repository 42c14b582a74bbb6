"""Backward: one pass over many workers, from its coordinator to its participants.

coordinator.py is the worker whose backward() began it, participant.py every other one; both end it
by pass_ending.py. active_pass.py is what both know of a pass, engine_run.py runs torch's engine.
Read coordinator.py first.
"""
