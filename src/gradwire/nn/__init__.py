"""Modules that live on another worker."""
