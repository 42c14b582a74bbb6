"""The peers of a worker: names, addresses, the secret of the job, and refused requests.

directory.py says who is a member; secret.py authenticates members and the store they meet in.
Read directory.py first.
"""
