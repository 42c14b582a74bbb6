"""Transports: channels that carry whole frames between two workers.

One file or folder per kind of channel: memory, unix, tcp, tls; the last three share sockets/.
Read contract.py first: it is the contract of every transport.
"""
