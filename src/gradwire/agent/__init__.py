"""Requests and answers between named workers; knows no functions, no gradients.

From the bottom: peers/ (who), requests/ (what we asked), serving/ (what we are asked), links/ (over
which channel), agent.py, membership/ (joining, failure detection, shutdown). Read agent.py first.
"""
