"""Backward: one pass over many workers, from its coordinator to its participants.

coordinator.py is the worker whose backward() began it, participant.py every other one, where
pass_ending.py ends it; active_pass.py is what both know of a pass, engine_run.py runs torch's
engine. Read coordinator.py first.
"""
