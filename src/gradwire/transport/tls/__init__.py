"""TLS 1.3 over TCP, between workers that show each other certificates.

identity.py says who a certificate stands for; stream.py makes a TLS connection look like a socket.
Read transport.py first.
"""
