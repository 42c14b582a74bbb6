"""Steps over parameters that live on many workers."""
