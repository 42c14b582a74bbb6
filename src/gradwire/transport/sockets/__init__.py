"""Channels and listeners over stream sockets, shared by unix, tcp and tls.

channel.py receives, writer.py sends; stream.py waits for the socket they share, and closes it.
Read channel.py first.
"""
