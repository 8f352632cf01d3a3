"""The gradient of a streamed step against verl's own update of the whole batch, for each loss that verl knows.

The combinations are generated from verl's registry of losses and its own list of aggregations: a new loss is either right,
or refused by name, or it fails here. Each is streamed in an order, to a budget and with a rejection drawn at random. In
`make test` the losses of ours and sapo meet every aggregation, the others a third of them, in turn."""

import json
from pathlib import Path

import grpo_lab
import pytest
from tree import SUPPORT

pytest.importorskip("torch")

from flashpatch.verify.probes.grpo.job import ROWS

pytestmark = pytest.mark.verl

CODE = """
    import inspect, json, random, re, sys
    import pytest
    from pathlib import Path
    sys.path.append(os.environ["SUPPORT"])
    import flashpatch
    flashpatch.enable("cpu", "bf16", "grpo", "flowrl")
    import stream_rounds as lab
    from flashpatch.patches._shared.context import holding
    from flashpatch.patches.flowrl import actor as flowrl
    from flashpatch.patches.grpo.streaming.divisor import UNITS
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss
    torch.manual_seed(0)
    folder = Path(os.environ["FOLDER"])
    if rank == 0:
        lab.job.tiny(folder / "model")
        lab.job.verl_actor.write_model(folder / "draws", norms=1.0, attention_dropout=0.1)
    dist.barrier()
    batch = lab.rows(folder / "model")
    rejected = lab.corrected(batch)
    named = set(re.findall(r'"((?:seq|token)-[a-z-]+)"', inspect.getsource(agg_loss)))
    EVERY = {"flowrl", "grpo_exact", "sapo"}
    TERMS = [dict(), dict(entropy=0.3), dict(kl=0.5), dict(entropy=0.3, kl=0.5)]
    def distance(engine, mode, aggregation, chance, terms):
        correction = chance.choice((None, lab.CORRECTION))
        how = dict(order=chance.sample(range(len(batch)), len(batch)), budget=chance.choice((12, 16, 24, 40, 200)))
        actor = lab.settings(mode, aggregation, **terms)
        found, metrics, rounds, fillers = lab.streamed(
            engine, actor, batch, rank, world, correction=correction, **how)
        rows = rejected if correction else batch
        target, sums = lab.whole(engine, actor, rows, rank, world)
        samples = sum(bool(row["response_mask"].any()) for row in rows)
        off = {name: [float(metrics[name]), float(value)] for name, value in sums.items()
               if abs(metrics[name] - value) > 1e-5 * max(1, abs(value))}
        return dict(away=float((found - target).norm() / target.norm()), rounds=rounds, fillers=fillers,
                    samples=metrics["samples_trained"] - samples, metrics=off)
    def drawn(engine, mode, seed):
        chance = random.Random(seed)
        for place, aggregation in enumerate(sorted(named)):
            if not ALL and mode not in EVERY and (place + seed) % 3:
                continue
            for terms in TERMS if ALL else [chance.choice(TERMS)]:
                try:
                    found = distance(engine, mode, aggregation, chance, terms)
                except flashpatch.PatchError as error:
                    found = str(error)
                yield f"{mode} {aggregation} {terms}", found
    seen, modes = {}, sorted(POLICY_LOSS_REGISTRY)
    for strategy, wanted in STRATEGIES.items():
        plain = lab.job.engine_for(strategy, folder / "model")
        with holding(flowrl.BUILDING, True):
            balanced = lab.job.engine_for(strategy, folder / "model")
        for at, mode in enumerate(wanted or modes):
            engine = balanced if mode == "flowrl" else plain
            seen |= {f"{strategy} {name}": got for name, got in drawn(engine, mode, 100 * SEED + at)}
    POLICY_LOSS_REGISTRY["sapo"].divides_by = "aggregation"  # as all losses were taken to divide
    wrong = max(distance(plain, "sapo", "token-mean", random.Random(seed), {})["away"] for seed in range(4))
    with pytest.raises(flashpatch.PatchError, match="nats from verl's old_log_probs"):
        distance(lab.job.engine_for("fsdp2", folder / "draws"), "sapo", "token-mean", random.Random(0), {})
    print(json.dumps([seen, modes, wrong, sorted(named ^ UNITS.keys())]))
"""
NEAR = {"flowrl": 5e-6}  # float32: its residual is the difference of terms some 15 times as large
REFUSED = {"bypass_mode", "clip_cov", "geo_mean", "kl_cov"}


def run(folder: Path, world: int, strategies: dict[str, list[str]], every: bool) -> None:
    code = (
        CODE.replace("STRATEGIES", repr(strategies)).replace("ALL", repr(every)).replace("SEED", str(world))
    )
    said = grpo_lab.ranks(code, folder, world, timeout=900, FOLDER=str(folder), SUPPORT=str(SUPPORT))
    for rank in said:
        seen, modes, wrong, unknown = json.loads(rank.strip().splitlines()[-1])
        right = {name: got for name, got in seen.items() if isinstance(got, dict)}
        wide = {
            name: got
            for name, got in right.items()
            if got["away"] >= NEAR.get(name.split()[1], 1e-6) or got["samples"] or got["metrics"]
        }
        assert not wide, wide
        refused = {name.split()[1] for name, got in seen.items() if isinstance(got, str)}
        streamed = {name.split()[1] for name in right}
        assert REFUSED <= refused and not REFUSED & streamed and streamed | REFUSED == {*modes}
        assert {"flowrl", "grpo_exact", "sapo"} <= streamed and not unknown
        most = -(-ROWS // world)  # rounds, if each brings a row to each rank
        assert max(got["rounds"] for got in right.values()) >= min(4, most)
        assert wrong > 0.1, wrong
    assert world == 1 or any(
        got["fillers"]
        for rank in said
        for got in json.loads(rank.splitlines()[-1])[0].values()
        if "away" in got
    )


def test_every_loss_of_the_registry_is_right_or_refused(tmp_path):
    run(tmp_path, 2, {"fsdp2": [], "fsdp": ["grpo_exact", "flowrl"]}, every=False)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_loss_with_every_term(tmp_path, world):
    run(tmp_path, world, {"fsdp": [], "fsdp2": []}, every=True)
