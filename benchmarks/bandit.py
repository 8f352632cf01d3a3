"""The bandit's rules on traces of decode steps: how near they come to the best fixed arm.

    python benchmarks/bandit.py [--trace FILE ...] [--seeds 3] [--rules thompson,swucb] [--json]

A rule sees only the arm it chose, pays the trace's cost of each switch in seconds, and is told step times that
include it. Columns:

    of best    tokens per second against the best fixed arm in hindsight on that trace, which never switches
    of none    tokens per second against no speculation
    switches   share of the steps that began with a switch
    us         select and update together, microseconds per step, mean

``fastrl_eg`` and ``fastrl_beg`` are FastRL's rules as published (`bandit_fastrl.py`). Without ``--trace`` the
traces are made up (`bandit_traces.py` says how, and what a recorded file looks like) and labelled SYNTHETIC.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import fmean

from bandit_fastrl import PUBLISHED
from bandit_traces import KINDS, Trace, made_up, read

from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.policy import Policy
from flashpatch.patches.eagle.bandit.rules import DEFAULT, RULES
from flashpatch.report import Table, emit


@dataclass(frozen=True)
class Outcome:
    """What a rule got out of a trace: tokens per simulated second, share of switches, own microseconds per step."""

    rate: float
    switches: float
    micros: float


def replay(trace: Trace, rule: str, seed: int) -> Outcome:
    """Let a rule run through a trace."""
    if rule in PUBLISHED:
        policy = PUBLISHED[rule](trace.arms, seed)
    else:
        policy = Policy(trace.arms, rule=rule, seed=seed)
    select, update, clock = policy.select, policy.update, time.perf_counter
    got = spent = own = 0.0
    before, switches = None, 0
    for batch, pairs in trace.steps:
        began = clock()
        arm = select(batch)
        own += clock() - began
        tokens, seconds = pairs[arm]
        if before is not None and arm != before:
            seconds += trace.switch_seconds
            switches += 1
        before = arm
        got += tokens
        spent += seconds
        began = clock()
        update(batch, arm, tokens, seconds)
        own += clock() - began
    steps = len(trace.steps)
    return Outcome(got / spent, switches / steps, 1e6 * own / steps)


def fixed(trace: Trace) -> dict[Arm, float]:
    """Tokens per second of each arm over the whole trace, where the guard lets it run."""
    rates = {}
    for arm in trace.arms:
        pairs = [
            step[arm if arm.draft_tokens * batch <= 2048 or Arm.DISABLE not in step else Arm.DISABLE]
            for batch, step in trace.steps
        ]
        rates[arm] = sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)
    return rates


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", default=",".join([*RULES, *PUBLISHED]))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    traces = [read(path) for path in options.trace] or [made_up(kind, 0) for kind in KINDS]
    table = Table("the bandit's rules", ["trace", "source", "rule", "of best", "of none", "switches", "us"])
    shares: dict[str, list[float]] = {}
    for trace in traces:
        rates = fixed(trace)
        best = max(rates, key=lambda arm: rates[arm])
        none = rates.get(Arm.DISABLE, float("nan"))
        table.add(trace.name, trace.source, f"best fixed: {best}", "1.000", f"{rates[best] / none:.3f}", "", "")
        for rule in options.rules.split(","):
            runs = [replay(trace, rule, seed) for seed in range(options.seeds)]
            rate = fmean(run.rate for run in runs)
            shares.setdefault(rule, []).append(rate / rates[best])
            table.add(
                trace.name, trace.source, rule + (" (default)" if rule == DEFAULT else ""),
                f"{rate / rates[best]:.3f}", f"{rate / none:.3f}",
                f"{fmean(run.switches for run in runs):.3f}", f"{min(run.micros for run in runs):.1f}",
            )
    whole = Table("over all traces", ["rule", "of best, mean", "of best, worst"])
    for rule, found in sorted(shares.items(), key=lambda item: -fmean(item[1])):
        whole.add(rule, f"{fmean(found):.3f}", f"{min(found):.3f}")
    emit([table, whole], options.json)


if __name__ == "__main__":
    main()
