"""Errors that tell the user what to change."""


class UsageError(ValueError):
    """The command or config asks for something that cannot be done; the message says what to change."""
