"""User functions and values on other workers.

calls/ makes and serves calls, codec/ encodes values, expose/ says what peers may name, refs/ counts
references, recompute/ is for activation checkpoints. worker.py builds it all. Read api.py first.
"""
