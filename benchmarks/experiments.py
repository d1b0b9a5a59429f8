"""Settings of ``benchmarks.step`` that each answer one question about replicas of shard groups.

    python -m benchmarks.step --experiment fusion

All run on four hosts, two replicas of two ranks each, and end with a second table: which part of the forward, of the
backward and of the update went into communication, lane by lane. See ``benchmarks.probe``.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Experiment:
    """What is compared, and where.

    Attributes:
        question: for people.
        contenders: who takes part.
        shape: fields of ``benchmarks.gpt.Shape`` that differ from its defaults.
        replicas: of two ranks each.
    """

    question: str
    contenders: tuple[str, ...]
    shape: dict[str, int] = field(default_factory=dict)
    replicas: int = 2


EXPERIMENTS = {
    "fusion": Experiment(
        "one gather and one reduce-scatter for each bucket, or one for each parameter?",
        ("compute", "stage2_overlap", "per_parameter"),
    ),
    "fusion_narrow": Experiment(
        "the same with many small parameters: 32 layers of width 128",
        ("compute", "stage2_overlap", "per_parameter"),
        {"layers": 32, "width": 128},
    ),
    "gather_bound": Experiment(
        "a forward that is shorter than its gathers: a quarter of the batch",
        ("compute", "stage2", "stage2_overlap", "stage3_overlap", "sharding_v1"),
        {"batch": 1},
    ),
    "backward_heavy": Experiment(
        "a large batch of short sequences: 32 x 32",
        ("compute", "stage2", "stage2_overlap", "stage3_overlap", "sharding_v1"),
        {"batch": 32, "context": 32},
    ),
    "breakdown": Experiment(
        "what a forward consists of: packing, the collective, waiting",
        ("compute", "stage2", "stage2_overlap", "per_parameter", "stage3_overlap"),
    ),
}
"""By their names on the command line."""
