"""The peers of a worker: names, addresses, the secret of the job, and refused requests.

state.py decides who is a member; directory.py is what the other modules use.
Read directory.py first.
"""
