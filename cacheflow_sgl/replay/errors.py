"""The errors a user of the replay can meet: one clear line each."""


class ReplayError(Exception):
    """The replay cannot start: an unusable trace, option or server. The message is one line."""


class FormatError(ReplayError):
    """A document of a trace is not what its format says; the loader adds file and line."""
