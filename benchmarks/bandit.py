"""The bandit, and FastRL's, on traces of decode steps: how near they come to the best fixed arm.

    python benchmarks/bandit.py [--trace FILE ...] [--seeds 3] [--rules thompson,fastrl_eg] [--json]

A rule sees only the arm it chose, pays the trace's cost of each switch in seconds, and is told step times
that include it. Columns:

    of best    tokens per second against the best fixed arm in hindsight on that trace, which never switches
    of none    tokens per second against no speculation
    switches   share of the steps that began with a switch
    us         select and update together, microseconds per step: mean without the slowest 1 % of the steps,
    which
               on a busy machine are those it was taken away from

``fastrl_eg`` and ``fastrl_beg`` are FastRL's rules as published (`bandit_fastrl.py`). Without ``--trace`` the
traces are made up (`bandit_traces.py` says how, and what a recorded file looks like) and labelled SYNTHETIC."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import quick
from bandit_fastrl import GUARD, PUBLISHED
from bandit_traces import KINDS, Trace, made_up, read

from flashpatch.commands.report import Table, emit
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.policy import Policy

OURS = "thompson"


@dataclass(frozen=True)
class Outcome:
    """What a rule got out of a trace: tokens per simulated second, share of switches, own microseconds per
    step."""

    rate: float
    switches: float
    micros: float


def replay(trace: Trace, rule: str, seed: int) -> Outcome:
    """Let a rule run through a trace."""
    if rule in PUBLISHED:
        policy = PUBLISHED[rule](trace.arms, seed)
    else:
        policy = Policy(trace.arms, seed=seed)
    return run(trace, policy.select, policy.update)


def run(
    trace: Trace, select: Callable[[int], Arm], update: Callable[[int, Arm, float, float], None]
) -> Outcome:
    """Go through the job; a step moves on by the tokens per row that it gave."""
    clock, steps = time.perf_counter, trace.steps
    got = spent = at = 0.0
    own: list[float] = []
    before, switches, count = None, 0, 0
    while at < len(steps):
        batch, pairs = steps[int(at)]
        began = clock()
        arm = select(batch)
        chose = clock() - began
        tokens, seconds = pairs[arm]
        if before is not None and arm != before:
            seconds += trace.switch_seconds
            switches += 1
        before = arm
        got += tokens
        spent += seconds
        at += tokens / batch
        count += 1
        began = clock()
        update(batch, arm, tokens, seconds)
        own.append(chose + clock() - began)
    own.sort()
    return Outcome(got / spent, switches / count, 1e6 * fmean(own[: max(1, len(own) * 99 // 100)]))


def fixed(trace: Trace) -> dict[Arm, float]:
    """Tokens per second of each arm over the whole job; where the guard forbids it, of no speculation."""

    def keep(arm: Arm) -> Callable[[int], Arm]:
        return lambda batch: arm if arm.draft_tokens * batch <= GUARD else Arm.DISABLE

    return {arm: run(trace, keep(arm), lambda *step: None).rate for arm in trace.arms}


def main() -> None:
    """Print the tables."""
    parser = quick.parser(__doc__)
    parser.add_argument("--trace", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", default=",".join([OURS, *PUBLISHED]))
    parser.add_argument("--json", action="store_true")
    options = quick.parse(parser, seeds=1, rules=OURS)
    traces = [read(path) for path in options.trace] or [made_up(kind, 0) for kind in KINDS]
    rows, data = [], []
    shares: dict[str, list[float]] = {}
    for trace in traces:
        rates = fixed(trace)
        best = max(rates, key=lambda arm: rates[arm])
        none = rates.get(Arm.DISABLE, float("nan"))
        rows.append(
            [trace.name, trace.source, f"fixed: {best}", "x1.000", f"x{rates[best] / none:.3f}", "", ""]
        )
        for rule in options.rules.split(","):
            runs = [replay(trace, rule, seed) for seed in range(options.seeds)]
            rate, switches = fmean(run.rate for run in runs), fmean(run.switches for run in runs)
            micros = min(run.micros for run in runs)
            shares.setdefault(rule, []).append(rate / rates[best])
            one = {"trace": trace.name, "source": trace.source, "rule": rule, "of_best": rate / rates[best]}
            data.append({**one, "of_none": rate / none, "switches": switches, "us": micros})
            figures = [
                f"x{rate / rates[best]:.3f}",
                f"x{rate / none:.3f}",
                f"{switches:.1%}",
                f"{micros:.1f}",
            ]
            rows.append([trace.name, trace.source, rule, *figures])
    order = sorted(shares, key=lambda rule: -fmean(shares[rule]))
    whole = [[rule, f"x{fmean(shares[rule]):.3f}", f"x{min(shares[rule]):.3f}"] for rule in order]
    columns = ["trace", "source", "rule", "of best", "of none", "switches", "us"]
    title = f"tokens per second by rule, mean of {options.seeds} seeds; aims: of best above x0.95, us below 1"
    tables = [Table(title, columns, rows), Table("over all traces", ["rule", "mean of best", "worst"], whole)]
    emit(data, tables, options.json)


if __name__ == "__main__":
    main()
