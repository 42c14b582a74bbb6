"""The peers of a worker: names, addresses, the secret of the job, and refused requests.

directory.py says who is a member; state.py has the roster that an open world shares.
Read directory.py first.
"""
