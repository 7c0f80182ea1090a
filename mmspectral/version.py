"""The one place where the version is written; setup.py reads it as text."""

__version__ = "0.1.0"
