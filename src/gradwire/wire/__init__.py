"""Objects to bytes and back; pure."""
