"""What a `bench restore` measures."""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("recompute", "load", "cake", "split", "cacheflow")
"""What a row can be of. `load` is the better of SGLang's own load-back and our all-load."""


@dataclass(frozen=True)
class RestoreOptions:
    """One run of `bench restore`; token counts are tokens.

    Attributes:
        policies: rows to report, of `POLICIES`.
        balances: each (time to recompute the prefix) / (time to load it), set by a throttle.
        prefix_tokens: lengths of the prefix that lies on the host, multiples of `page`.
        suffix_tokens: what follows it, at most a page: it must be found in no cache, and whole
            pages of a request are.
        repeats: counted rounds; in each every variant runs once.
        model: directory or name; None is the tiny model, of this seed.
        chunk: rows of a prefill forward.
        page: tokens of a KV page.
        overlap: whether the server runs SGLang's overlap schedule.
        decodes: requests that decode beside each restore.
        seed: of prompts and weights.

    Raises:
        ValueError: a value is out of range; the message names the option.
    """

    policies: tuple[str, ...] = ("recompute", "load", "cake", "cacheflow")
    balances: tuple[float, ...] = (1.0,)
    prefix_tokens: tuple[int, ...] = (4096,)
    suffix_tokens: int = 64
    repeats: int = 15
    model: str | None = None
    chunk: int = 512
    page: int = 64
    overlap: bool = True
    decodes: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for policy in self.policies:
            if policy not in POLICIES:
                raise ValueError(f"--policies: {policy!r} is none of {', '.join(POLICIES)}")
        if self.page < 1 or self.chunk < self.page or self.chunk % self.page:
            raise ValueError(f"--chunk is {self.chunk}; it must be a multiple of --page")
        for prefix in self.prefix_tokens:
            if prefix < 2 * self.page or prefix % self.page:
                raise ValueError(
                    f"--prefix-tokens: {prefix} is not two or more whole pages of {self.page}"
                )
        if not 1 <= self.suffix_tokens <= self.page:
            raise ValueError(
                f"--suffix-tokens is {self.suffix_tokens}; it must be 1 to {self.page} (--page): "
                "whole pages of it would be cached from the request before"
            )
        if any(not balance > 0 for balance in self.balances):
            raise ValueError("--balance: each must be above 0")
        if self.repeats < 1 or self.decodes < 0:
            raise ValueError("--repeats must be at least 1, and --decode not negative")

    @property
    def variants(self) -> tuple[str, ...]:
        """What each round runs: the two single ways are always there, rows are compared to them."""
        asked = [policy for policy in self.policies if policy not in ("recompute", "load")]
        return ("recompute", "sglang", "load", *asked)
