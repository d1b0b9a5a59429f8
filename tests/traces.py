"""Traces of an imagined training, whose every figure follows from a few numbers: for tests of what reads traces."""

from __future__ import annotations

from typing import NamedTuple

from hp_sharding.trace.spans import Span, Step, Trace


class Run(NamedTuple):
    """An imagined run of stage 2 with all overlap: times in milliseconds, a bucket for each layer.

    Attributes:
        n_layers: called "blocks.0" and so on, of a model "GPT".
        n_ranks: over which each bucket is sharded; twice as many ranks where ``replicas`` is 2.
        n_steps: recorded.
        forward_ms: of a layer; its backward takes twice that, its update a tenth.
        gather_ms: of a layer; its reduction takes as long, its replication half of that.
        replicas: 1 or 2.
        slow_rank: computes a fifth longer.
    """

    n_layers: int = 8
    n_ranks: int = 2
    n_steps: int = 2
    forward_ms: float = 10.0
    gather_ms: float = 6.0
    replicas: int = 1
    slow_rank: int | None = None

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.n_ranks * self.replicas


BUCKET_BYTES = 4_000_000


def make(run: Run) -> Trace:
    """The trace of such a run."""
    spans: list[Span] = []
    steps: list[Step] = []
    for rank in range(run.world):
        recorder = _Rank(run, rank)
        steps += [recorder.step(number) for number in range(run.n_steps)]
        spans += recorder.spans
    buckets = [
        {"name": _bucket(layer), "layer": _layer(layer), "nbytes": BUCKET_BYTES} for layer in range(run.n_layers)
    ]
    about = {
        "nranks": run.world,
        "replicas": run.replicas,
        "device": "cpu",
        "date": "2026-05-04 12:00:00",
        "versions": {"hp_sharding": "0.1.0", "paddle": "3.3.1"},
        "config": {"stage": 2, "allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 25},
        "clock": {"how": "one host", "uncertainty_s": 0.0},
        "buckets": buckets,
        "simulated": True,
    }
    return Trace(spans, steps, about)


def _layer(number: int) -> str:
    return f"blocks.{number}"


def _bucket(number: int) -> str:
    return f"{number}:{_layer(number)}"


class _Rank:
    """Plays one rank: one clock for compute, one for each lane, first in, first out."""

    def __init__(self, run: Run, rank: int) -> None:
        self._run, self._rank = run, rank
        self._pace = 1e-3 * (1.2 if rank == run.slow_rank else 1.0)
        self._now_s = 0.0
        self._free_s = dict.fromkeys(("gather", "reduce", "replicate"), 0.0)
        self._gathered: dict[int, Span] = {}
        self.spans: list[Span] = []

    def step(self, number: int) -> Step:
        start_s = self._now_s
        layers = range(self._run.n_layers)
        for layer in layers:
            if layer in self._gathered:
                self._wait(self._gathered[layer])
            self._compute("forward", layer, self._run.forward_ms)
        reduced = []
        for layer in reversed(layers):
            self._compute("backward", layer, 2 * self._run.forward_ms)
            reduced.append(self._send("reduce", layer, self._run.gather_ms))
            if self._run.replicas > 1:
                reduced[-1] = self._send("replicate", layer, self._run.gather_ms / 2, after_s=reduced[-1].end_s)
        for span in reversed(reduced):
            self._wait(span)
        for layer in layers:
            self._compute("update", layer, self._run.forward_ms / 10)
            self._gathered[layer] = self._send("gather", layer, self._run.gather_ms)
        figures = {"peak_bytes": 1e8 + number, "formula_bytes": 9.9e7, "wrong_guesses": 0.0}
        return Step(self._rank, number, start_s, self._now_s, figures)

    def _compute(self, label: str, layer: int, ms: float) -> None:
        end_s = self._now_s + ms * self._pace
        self.spans.append(Span(self._rank, "compute", label, self._now_s, end_s, 0, _layer(layer)))
        self._now_s = end_s

    def _send(self, lane: str, layer: int, ms: float, after_s: float = 0.0) -> Span:
        start_s = max(self._now_s, self._free_s[lane], after_s)
        self._free_s[lane] = start_s + ms * 1e-3
        span = Span(self._rank, lane, _bucket(layer), start_s, self._free_s[lane], BUCKET_BYTES, _layer(layer))
        self.spans.append(span)
        return span

    def _wait(self, span: Span) -> None:
        if span.end_s > self._now_s:
            self.spans.append(Span(self._rank, "wait", span.label, self._now_s, span.end_s, 0, span.layer))
            self._now_s = span.end_s
