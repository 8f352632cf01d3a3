"""What is compared: per world a list of methods. Names are unique within a part."""

from __future__ import annotations

from dataclasses import replace

from methods import Method

RATES = (0.03, 0.1)
"""Tried for every row of the comparison, so that all are tuned alike."""

FLOWRL = Method("FlowRL")  # as shipped, but for beta: normalised reward, learned log Z, mean, clip
TUNED = replace(FLOWRL, log_z="group", reward="raw")
GRPO = Method("GRPO", kind="grpo")
REINFORCE = Method("REINFORCE, KL in the reward", kind="reinforce")


def comparison() -> list[Method]:
    """Methods side by side on the expressions; four tokens make FlowRL's beta count four times."""
    rows = [GRPO]
    rows += [replace(GRPO, name=f"GRPO, entropy {c:g}", entropy=c) for c in (0.001, 0.01)]
    rows += [replace(GRPO, name=f"GRPO, KL {c:g}", kl=c) for c in (0.001, 0.01)]
    rows += [replace(REINFORCE, name=f"REINFORCE, KL {1 / b:.3g}", beta=b) for b in (4.0, 20.0)]
    rows += [replace(FLOWRL, name=f"FlowRL, beta {b:g}", beta=b) for b in (1.0, 5.0, 15.0)]
    rows += [replace(TUNED, name=f"FlowRL, beta {b:g}, raw, group", beta=b) for b in (1.0, 5.0, 15.0)]
    return [replace(row, name=f"{row.name} @ {rate:g}", rate=rate) for row in rows for rate in RATES]


def terms(base: Method = FLOWRL) -> list[Method]:
    """One change at a time, from FlowRL as shipped and from what reaches its target."""
    raw = replace(base, reward="raw")
    tuned = replace(raw, log_z="group")
    rows = [
        ("as shipped", base),
        ("proj_z at 10x", replace(base, z_rate=10.0)),
        ("proj_z at 100x", replace(base, z_rate=100.0)),
        ("log Z the group's mean", replace(base, log_z="mean")),
        ("log Z of the group", replace(base, log_z="group")),
        ("raw reward", raw),
        ("raw, proj_z at 100x", replace(raw, z_rate=100.0)),
        ("raw, the group's mean", replace(raw, log_z="mean")),
        ("raw, exact log Z", replace(raw, log_z="exact")),
        ("raw, group", tuned),
        ("sum, beta 4x", replace(base, length="sum", beta=4 * base.beta)),
        ("raw, group, sum, beta 4x", replace(tuned, length="sum", beta=4 * base.beta)),
        ("3x steps", replace(base, steps=3.0)),
        ("raw, group, 3x steps", replace(tuned, steps=3.0)),
    ]
    for weight in ("clip", "none"):
        rows.append((f"4 updates, {weight}", replace(base, updates=4, weight=weight)))
        rows.append((f"raw, group, 4 updates, {weight}", replace(tuned, updates=4, weight=weight)))
    descent = {"optimizer": "SGD"}  # at rates of which all pass a reward of 0.9 about as fast
    rows += [
        ("SGD: GRPO", replace(GRPO, rate=6.0, **descent)),
        ("SGD: as shipped", replace(base, rate=1.5, **descent)),
        ("SGD: raw, the group's mean", replace(raw, log_z="mean", rate=1.0, **descent)),
        ("SGD: raw, exact log Z", replace(raw, log_z="exact", rate=1.0, **descent)),
        ("SGD: raw, group", replace(tuned, rate=1.0, **descent)),
    ]
    return [replace(row, name=name) for name, row in rows]


def lengths() -> list[Method]:
    """On strings of 1 to 8 letters, where a mean over tokens aims at something else than a sum."""
    rows = [GRPO, replace(GRPO, name="GRPO, KL 0.1", kl=0.1)]
    rows += [replace(REINFORCE, name=f"REINFORCE, KL {1 / b:.3g}", beta=b) for b in (1.0, 5.0, 15.0)]
    for length in ("mean", "sum"):
        for beta in (1.0, 5.0, 15.0):
            at = {"length": length, "beta": beta}
            rows.append(replace(FLOWRL, name=f"FlowRL, {length}, beta {beta:g}", **at))
            rows.append(replace(TUNED, name=f"FlowRL, {length}, beta {beta:g}, raw, group", **at))
    return rows


def network(rate: float = 1e-3) -> list[Method]:
    """On the transformer, whose log Z is the package's network on hidden states."""
    rows = [
        GRPO,
        replace(GRPO, name="GRPO, KL 0.1", kl=0.1),
        replace(REINFORCE, name="REINFORCE, KL 0.0667", beta=15.0),
        replace(REINFORCE, name="REINFORCE, KL 0.333", beta=3.0),
        replace(FLOWRL, name="as shipped"),
        replace(FLOWRL, name="as shipped, beta 15", beta=15.0),
        replace(FLOWRL, name="proj_z at 100x", z_rate=100.0),
        replace(TUNED, name="raw, exact log Z", log_z="exact"),
        replace(TUNED, name="raw, group"),
        replace(TUNED, name="raw, group, beta 1", beta=1.0),
        replace(GRPO, name="GRPO, 64 responses", samples=64),
        replace(TUNED, name="raw, group, 64 responses", samples=64),
    ]
    return [replace(row, rate=rate) for row in rows]
