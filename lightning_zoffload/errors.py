"""Exceptions a user may want to catch by name; each is also what torch or Python would raise."""


class HostMemoryError(MemoryError):
    """Host memory for masters, moments or exchange buffers could not be had."""


class CheckpointMismatchError(ValueError):
    """An optimizer state does not fit the parameters it is loaded for."""
