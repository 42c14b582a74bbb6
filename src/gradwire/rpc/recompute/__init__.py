"""Activation checkpoints whose function makes remote calls: callees repeat their random numbers.

Read the note in checkpoint_run.py first; recording.py has what one run leaves to its repetitions.
"""
