"""Values and gradients of verl's own update under ``grpo_exact`` on two ranks, FSDP1 and FSDP2, against formulas in float64: each
aggregation with each KL that verl knows, beside temperatures, an entropy term, importance weights, packing, splits, dynamic batches and, with FSDP2,
Ulysses. Of the batch's rows some have no output, and one has a masked token."""

import json

import grpo_lab
import pytest
from tree import SUPPORT

pytestmark = pytest.mark.verl

CODE = """
    import json, sys
    from itertools import cycle, product
    from pathlib import Path
    sys.path.append(os.environ["SUPPORT"])
    import flashpatch
    flashpatch.enable("cpu", "bf16", "grpo")
    import stream_rounds as lab
    from transformers import Qwen2ForCausalLM
    from flashpatch.patches.grpo.loss.grpo_exact import AGGREGATIONS

    KLS = "kl abs mse low_var_kl k1+ abs+ k3+".split()
    SPLITS = [dict(), dict(micro_batch_size_per_gpu=1), dict(use_dynamic_bsz=True, max_token_len_per_gpu=24)]
    CLIP = dict(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=1.5)
    ENTROPY, KL, CONSTANT = 0.3, 0.5, 12  # the last is the laboratory's

    def penalty(kind, away):  # of log-probabilities less the reference's: its value, with its gradient
        value = dict(kl=away, k1=away, abs=away.abs(), mse=away**2 / 2)
        value["low_var_kl"] = value["k3"] = ((-away).exp() + away - 1).clamp(-10, 10)
        if kind[-1] != "+":
            return value[kind]
        return away**2 / 2 - (away**2 / 2).detach() + value[kind[:-1]].detach()

    def by_hand(model, batch, aggregation, kind, temperature):
        model.zero_grad()
        kept = [row for row in batch if row["response_mask"].any()]
        tokens = sum(int(row["response_mask"].sum()) for row in kept)
        sums = dict.fromkeys(["actor/pg_loss", "actor/entropy_loss", "kl_loss"], 0.0)
        for row in kept:
            mask, size = row["response_mask"].double(), int(row["response_mask"].sum())
            divisor = {"seq-mean-token-mean": size * len(kept), "seq-mean-token-sum": len(kept), "token-mean": tokens,
                       "token-sum": 1, "seq-mean-token-sum-norm": CONSTANT * len(kept)}[aggregation]
            logits = model(input_ids=row["input_ids"][None]).logits[0, -len(mask) - 1 : -1] / temperature
            logs = torch.log_softmax(logits, -1)
            new = logs.gather(-1, row["responses"][:, None])[:, 0]
            ratio, gain = (new - row["old_log_probs"]).exp(), row["advantages"]
            clipped = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.9, 1.3))
            clipped = torch.where(gain < 0, torch.minimum(clipped, -gain * 1.5), clipped) * row["rollout_is_weights"]
            away = new - row["ref_log_prob"]
            for name, values in zip(sums, (clipped, -(logs.exp() * logs).sum(-1), penalty(kind, away))):
                sums[name] = sums[name] + (values * mask).sum() / divisor
        total = sums["actor/pg_loss"] - ENTROPY * sums["actor/entropy_loss"] + KL * sums["kl_loss"]
        total.backward()
        gradient = torch.cat([one.grad.flatten() for _, one in sorted(model.named_parameters())])
        return gradient, {name: float(value) for name, value in sums.items()}

    folder, seen = Path(os.environ["FOLDER"]), {}
    if rank == 0:
        lab.job.tiny(folder / "model")
    dist.barrier()
    wide = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="eager")
    batch, draw = lab.rows(folder / "model"), torch.Generator().manual_seed(5)
    for row in batch:
        row["old_log_probs"] = row["rollout_log_probs"]  # off policy, so that some ratios are clipped
        row["rollout_is_weights"] = torch.rand(len(row["responses"]), generator=draw)
    batch[1]["response_mask"][1] = 0
    for strategy, parts in ("fsdp", 1), ("fsdp2", 1), ("fsdp2", world):
        lab.job.verl_actor.jobs.given()["model"]["use_remove_padding"] = parts > 1  # without it verl has no Ulysses
        engine = lab.job.engine_for(strategy, folder / "model", ulysses_sequence_parallel_size=parts)
        shares, rest = world // parts, cycle(product(SPLITS, (0.7, 1.0, 1.3), (parts > 1, True)))
        for (aggregation, kind), (split, temperature, packed) in zip(product(AGGREGATIONS, KLS), rest):
            target, values = by_hand(wide, batch, aggregation, kind, temperature)
            actor = lab.settings("grpo_exact", aggregation, ENTROPY, KL, kl_loss_type=kind, **CLIP)
            how = dict(split, temperature=temperature, use_remove_padding=packed)
            found, sums = lab.whole(engine, actor, batch, rank % shares, shares, **how)
            away = {name: abs(sums[name] - value) / max(1, abs(value)) for name, value in values.items()}
            seen[f"{strategy} {parts} {aggregation} {kind} {how}"] = [float((found - target).norm() / target.norm()), *away.values()]
    print(json.dumps(seen))
"""


def test_values_and_gradients_are_those_of_float64(tmp_path):
    said = grpo_lab.ranks(CODE, tmp_path, 2, timeout=600, FOLDER=str(tmp_path), SUPPORT=str(SUPPORT))
    for rank in said:
        seen = json.loads(rank.strip().splitlines()[-1])
        assert len(seen) == 3 * 5 * 7
        wrong = {case: away for case, away in seen.items() if not max(away) < 1e-5}
        assert not wrong, wrong
