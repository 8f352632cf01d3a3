"""Keep what a trainer logs at each training step among the ledger's events, so that a report of the job can show it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from flashpatch import ledger

KEPT = (
    "actor/lr",
    "actor/pg_loss",
    "completions/mean_length",
    "critic/score/mean",
    "eagle/",
    "grad_norm",
    "kl",
    "loss",
    "mismatch/",
    "perf/max_memory",
    "perf/throughput",
    "perf/cpu_memory",
    "policy_loss",
    "response_length",
    "reward",
    "rollout/spec_accept",
    "rollout_corr/",
    "sampling/",
    "step_time",
    "stream/",
    "sync/",
    "timing_s/",
)
"""Beginnings of the names that are kept, verl's and TRL's; verl logs some two hundred more."""

_MOST = 150


def record(data: Mapping[str, Any], step: Any) -> None:
    """Record the finite numbers of ``data`` whose names begin as `KEPT` says, the first 150 of them; ``step`` is the
    trainer's, None if it names none."""
    kept = {name: value for name, value in sorted(data.items()) if name.startswith(KEPT)}
    finite = {name: _number(value) for name, value in kept.items()}
    values = {name: value for name, value in finite.items() if value is not None}
    if values:
        ledger.sample("metrics", step=step, values=dict(list(values.items())[:_MOST]))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(f"{float(value):.6g}")
