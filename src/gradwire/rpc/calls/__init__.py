"""One call: the side that makes it, the side that runs the function, and the future between.

client.py encodes, sends and waits; server.py decodes, runs and answers.
Read client.py first, then server.py.
"""
