"""One graph over many workers; uses the agent to cross."""
