"""Who takes part: names, addresses, the secret of the job, and what peers were refused.

state.py decides who is a member; directory.py is what everybody asks.
Read directory.py first.
"""
