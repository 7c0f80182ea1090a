"""Floor 3: checkpoint files: read, rename, reconcile, load."""
