"""How a simulated server is run: its engine, its batch policy, its pipeline."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from cacheflow_sgl.core.batch import BatchPolicyName


class Engine(enum.StrEnum):
    """How one prefix comes back.

    `RECOMPUTE` computes it. `LOAD` loads it up to the first hole, the suffix following layer by
    layer (SGLang's load-back at its best). `CAKE` splits by tokens, whole chunks in both lanes.
    `V1` is CacheFlow v1: by tokens, and from L_delta down as `STAIRCASE`, whose chunks are then few
    and cut by layers. `STAIRCASE` is ours in full.
    """

    RECOMPUTE = "recompute"
    LOAD = "load"
    CAKE = "cake"
    V1 = "v1"
    STAIRCASE = "staircase"


class Boundary(enum.StrEnum):
    """What later pipeline stages compute a prefix from.

    `EXACT`: stored boundary activations, so every stage restores by itself. `OFF`: what the stage
    before has computed, chunk by chunk. `OFF_SERIAL`: a stage starts when the one before is done.
    """

    EXACT = "exact"
    OFF = "off"
    OFF_SERIAL = "off_serial"


@dataclass(frozen=True)
class Setup:
    """How the simulated server is run."""

    engine: Engine = Engine.STAIRCASE
    policy: BatchPolicyName = BatchPolicyName.CACHEFLOW
    stages: int = 1
    boundary: Boundary = Boundary.EXACT
    layer_threshold: int = 0
    """L_delta of `V1`: shorter prefixes are restored by layers."""
    max_queued: int = 256
    """Most requests that restore or wait for compute; later ones wait until they may restore."""
    max_running: int = 256
    """Most requests that are prefilled or decoded; restores go on while others wait for a place."""
    kv_tokens: int | None = None
    """Most tokens of prompts and answers of those that run together; None: no limit. Prefixes that
    restore before their request runs, and the device cache, are not counted."""
    decode_steps: int = 0
    """Decode steps after each prefill forward; SGLang's default is none."""
    record: bool = False
    """Keep every piece of work, for timelines."""


OWN_ENGINE = {
    BatchPolicyName.RECOMPUTE: Engine.RECOMPUTE,
    BatchPolicyName.LOAD: Engine.LOAD,
    BatchPolicyName.CAKE: Engine.CAKE,
}
"""The engine of the policies that have one of their own."""
