"""The reference becomes the policy in place, on FSDP1 and FSDP2, and comes back from a checkpoint."""

from __future__ import annotations

import grpo_lab
import pytest

pytest.importorskip("torch")

CODE = """
    from pathlib import Path
    import flashpatch
    flashpatch.enable("cpu", "bf16", "grpo")
    import torch.distributed as dist
    import verl.workers.engine
    from flashpatch.errors import PatchError
    from flashpatch.patches.grpo.streaming import reference
    from flashpatch.verify.probes.grpo import job

    folder = Path(os.environ["FOLDER"])
    if rank == 0:
        job.tiny(folder / "model")
    dist.barrier()

    def moved(engine):
        with torch.no_grad():
            for _, shard in reference._shards(engine.module):
                shard.add_(0.5)

    def same(one, other):
        return all(torch.equal(a, b) for (_, a), (_, b) in zip(reference._shards(one.module), reference._shards(other.module)))

    for strategy in ("fsdp", "fsdp2"):
        policy, ref = (job.engine_for(strategy, folder / "model") for _ in range(2))
        assert same(policy, ref)
        moved(policy)
        assert not same(policy, ref)
        reference.copy_policy(policy.module, ref.module)
        assert same(policy, ref)
        rows = job.rows(__import__("transformers").Qwen2ForCausalLM.from_pretrained(folder / "model"))
        data = [job.share(rows, len(rows), {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 8}) for _ in range(2)]
        with policy.eval_mode(), ref.eval_mode():  # what a forward sees, not only what the shards hold
            logs = [one.infer_batch(part)["model_output"]["log_probs"].values() for one, part in zip((policy, ref), data)]
        assert torch.equal(*logs), strategy
        saved = folder / strategy
        reference.save(ref.module, saved, rank, world)
        kept = {name: shard.clone() for name, shard in reference._shards(ref.module)}
        moved(ref)
        reference.load(ref.module, saved, rank, world)
        assert all(torch.equal(kept[name], shard) for name, shard in reference._shards(ref.module))
        try:
            reference.load(ref.module, saved, rank, world + 1)
        except PatchError as error:
            assert "does not exist" in str(error) and "as many trainer ranks" in str(error)
        else:
            raise AssertionError("another number of ranks was loaded")
        if strategy == "fsdp":
            whole = torch.nn.Linear(2, 2)
            before = [shard.clone() for _, shard in reference._shards(ref.module)]
            try:
                reference.copy_policy(whole, ref.module)
            except PatchError as error:
                assert "on one side only" in str(error) and "reference_every" in str(error)
            else:
                raise AssertionError("another model was copied")
            assert all(torch.equal(a, b) for a, (_, b) in zip(before, reference._shards(ref.module)))
"""


@pytest.mark.verl
def test_the_reference_becomes_the_policy(tmp_path):
    grpo_lab.ranks(CODE, tmp_path, 2, FOLDER=str(tmp_path))
