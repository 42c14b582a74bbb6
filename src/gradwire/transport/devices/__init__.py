"""Tensors on accelerators between workers of one machine: memory that both can reach.

Read contract.py first: the contract. cuda.py implements it; words.py says which blocks are in use.
"""
