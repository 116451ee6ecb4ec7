"""What every command takes the same way: lists, and the signals that end it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T", int, float)


@contextmanager
def interruptible() -> Iterator[None]:
    """While open, SIGTERM is as Ctrl-C: what this process started would outlive it otherwise."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def numbers(option: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """The numbers of a list with commas; `ValueError` that names the option."""
    try:
        return tuple(kind(item) for item in text.split(","))
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not a number or a list of them") from None
