"""TLS 1.3 over TCP, between workers that show each other certificates.

identity.py maps certificates to worker names; stream.py gives a TLS connection a socket interface.
Read transport.py first.
"""
