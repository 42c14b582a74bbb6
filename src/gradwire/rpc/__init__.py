"""User functions and values on other workers."""
