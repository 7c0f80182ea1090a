"""Hooks and the launching of mmengine runs."""
