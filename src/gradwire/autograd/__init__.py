"""One autograd graph over many workers; uses the agent to cross.

graph/ records what crosses in forward, backward/ runs a pass over it, undo/ reverts a failed one.
Read engine.py first: it ties them together. api.py is what users call.
"""
