"""Starting workers on this machine, and the certificates of a job.

run.py starts and supervises processes; child.py is what each of them does.
Read run.py first.
"""
