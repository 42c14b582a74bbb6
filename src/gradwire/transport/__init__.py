"""Whole frames between two ends; IO, no meaning."""
