"""Errors that tell the user what to change."""


class UsageError(ValueError):
    """The command or config asks for something that cannot be done; the message says what to change."""


class DamagedCheckpointError(RuntimeError):
    """A file is no checkpoint, or no longer one."""


class UnsafeCheckpointError(RuntimeError):
    """A checkpoint needs code to be run in order to be read."""
