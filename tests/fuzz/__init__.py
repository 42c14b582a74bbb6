"""Hostile bytes for whatever reads what a peer sends: a value or a typed error, nothing else."""
