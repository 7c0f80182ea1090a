"""Hooks of scope ``mmspectral``."""
