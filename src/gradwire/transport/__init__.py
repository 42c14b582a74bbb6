"""Transports: channels that carry whole frames between two workers.

One file per kind of channel: memory, unix, tcp, tls; the last three share sockets/.
Read base.py first: it is the contract of every transport.
"""
