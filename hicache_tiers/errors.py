"""Errors of the tiers. I/O trouble is never one of them: it is a miss or a refused write."""


class StoreError(Exception):
    """The store can't be opened or used as asked; one line: what, where, and the mend."""


class IntegrityError(Exception):
    """`check_integrity` found index and segments that contradict each other: a defect."""
