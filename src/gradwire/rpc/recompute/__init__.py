"""Activation checkpoints whose function makes remote calls: callees repeat their random numbers.

checkpoint_hooks.py learns from torch when a checkpoint runs; checkpoint_run.py is one such run.
Read the note in checkpoint_run.py first.
"""
