"""Starting workers on this machine."""
