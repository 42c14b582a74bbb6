"""Activation checkpoints around calls: callees draw the same random numbers again.

checkpoint_hooks.py learns from torch when a checkpoint runs; session.py is one such run.
Read session.py first.
"""
