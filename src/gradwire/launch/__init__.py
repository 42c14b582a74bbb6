"""`gradwire.run`, which starts workers on this machine, and the certificates of a job.

run.py starts and supervises processes; child.py is what each of them runs.
Read run.py first.
"""
