"""The reference becomes the policy in place, whatever it has computed before, and comes back from a checkpoint; so does a model
that verl's `separate_async` puts back in place."""

from types import SimpleNamespace

import grpo_lab
import pytest

pytest.importorskip("torch")

CODE = """
    from itertools import product
    from pathlib import Path
    from types import SimpleNamespace
    import flashpatch
    flashpatch.enable("cpu", "bf16", "grpo", "fsdp", "flowrl")
    import torch.distributed as dist
    import transformers
    import verl.workers.engine
    from verl.experimental.separation.engine_workers import DetachActorWorker
    from flashpatch.errors import PatchError
    from flashpatch.patches._shared.context import holding
    from flashpatch.patches.flowrl.actor import BUILDING
    from flashpatch.patches.grpo.streaming import reference
    from flashpatch.verify.probes.grpo import job
    folder = Path(os.environ["FOLDER"])
    old, new = folder / "old", folder / "new"
    if rank == 0:
        job.tiny(old)
        model = transformers.Qwen2ForCausalLM.from_pretrained(old)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
        model.save_pretrained(new)
    dist.barrier()
    plain = {path: transformers.Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (old, new)}
    rows = job.rows(plain[old])
    def away(engine, path):
        data = job.share(rows, len(rows), {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 8})
        with engine.eval_mode():
            found = engine.infer_batch(data)["model_output"]["log_probs"].unbind()
        lengths = [len(row["responses"]) for row in rows]
        own = [job.own_logprobs(plain[path], row["input_ids"], length) for row, length in zip(rows, lengths)]
        return max(float((a[-n - 1:-1] - b).abs().max()) for a, b, n in zip(found, own, lengths))
    cases = [("fsdp", {"use_orig_params": orig, "reshard_after_forward": reshard}) for orig, reshard in product((True, False), repeat=2)]
    cases += [("fsdp2", {"reshard_after_forward": reshard}) for reshard in (True, False)]
    cases += [(strategy, {"fsdp_size": 1}) for strategy in ("fsdp", "fsdp2")]
    cases += [(strategy, {"mixed_precision": None}) for strategy in ("fsdp", "fsdp2")]  # verl's own: bf16
    wrong = []
    def expect(what, engine, path):
        far = away(engine, path)
        if far > (0.5 if "mixed_precision" in settings else 1e-4):
            wrong.append(f"{strategy} {settings} {what}: {far:.2g} away")
    for number, (strategy, settings) in enumerate(cases):
        with holding(BUILDING, True):
            policy = job.engine_for(strategy, new, **settings)
        assert any("proj_z" in name for name, _ in policy.module.named_parameters())
        ref = job.engine_for(strategy, old, forward_only=True, **settings)
        saved = folder / str(number) / "actor" / "reference"
        reference.save(ref.module, policy.module, saved, rank, world)
        expect("at first", ref, old)
        expect("policy", policy, new)
        try:
            worker = object.__new__(DetachActorWorker)
            worker._strategy_handlers, worker.actor = None, SimpleNamespace(engine=ref)
            worker.config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))
            worker.save_model_to_cpu(0)
            reference.copy_policy(policy.module, ref.module)
            expect("refreshed", ref, new)
            worker.save_model_to_cpu(1)
            for at, path in enumerate((old, new)):
                worker.restore_model_from_cpu(at)
                expect("put back by verl", ref, path)
            reference.load(ref.module, policy.module, saved, rank, world)
            expect("loaded", ref, old)
            reference.copy_policy(policy.module, ref.module)
            reference.save(ref.module, policy.module, saved, rank, world)
            reference.load(ref.module, policy.module, saved, rank, world)
            expect("saved after a forward", ref, new)
            expect("policy afterwards", policy, new)
        except Exception as error:
            wrong.append(f"{strategy} {settings}: {str(error)[:200]}")
    reference.load(ref.module, policy.module, folder / "without" / "actor" / "reference", rank, world)
    expect("left alone", ref, new)
    try:
        reference.load(ref.module, policy.module, saved, rank, world + 1)
    except PatchError as error:
        assert "does not exist" in str(error) and "as many trainer ranks" in str(error)
    else:
        raise AssertionError("another number of ranks was loaded")
    before = [shard.clone() for shard in reference._shards(ref.module).values()]
    try:
        reference.copy_policy(torch.nn.Linear(2, 2), ref.module)
    except PatchError as error:
        assert "on one side only" in str(error) and "reference_every" in str(error)
    else:
        raise AssertionError("another model was copied")
    assert not wrong, "\\n".join(["", *wrong])
    assert all(torch.equal(a, b) for a, b in zip(before, reference._shards(ref.module).values()))
"""


@pytest.mark.verl
def test_the_reference_becomes_the_policy(tmp_path):
    grpo_lab.ranks(CODE, tmp_path, 2, FOLDER=str(tmp_path))


def test_a_policy_that_is_still_being_offloaded_is_waited_for(monkeypatch):
    """verl's offload begins the copies to the host and goes on; the reference's shards lie there too."""
    import torch

    from flashpatch.patches.grpo.streaming import reference

    policy, ref = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    arriving = policy.weight.detach().clone()
    policy.weight.data.zero_()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: policy.weight.data.copy_(arriving))
    reference.copy_policy(policy, ref)
    assert torch.equal(ref.weight, arriving)


@pytest.mark.verl
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("held", [False, True])
def test_a_checkpoint_that_holds_a_reference_says_that_there_is_one(tmp_path, monkeypatch, every, held):
    """With reference_every = 0 it was left out of the next checkpoint, and training went on against the initial model."""
    import torch
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from flashpatch.patches.grpo.streaming import reference, trainer

    module, policy = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    folder = tmp_path / "global_step_4" / "actor" / "reference"
    if held:
        reference.save(module, policy, folder, 0, 1)
        saved = module.weight.detach().clone()
        module.weight.data.zero_()
    calls, group = [], SimpleNamespace()
    group.stream_load_reference = lambda path: [reference.load(module, policy, trainer.Path(path), 0, 1)]
    group.stream_save_reference = calls.append
    monkeypatch.setattr(trainer.engine, "options", lambda name: {"reference_every": every})
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: setattr(self, "global_steps", 4))
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: None)
    job = object.__new__(trainer.PPOTrainerStreamAsync)
    job.config = OmegaConf.create({"trainer": {"resume_mode": "auto", "default_local_dir": str(tmp_path)}})
    job.use_reference_policy, job.ref_policy_wg = True, group
    job._load_checkpoint()
    job.global_steps = 5
    job._save_checkpoint()
    assert not held or torch.equal(module.weight, saved)
    assert calls == [str(tmp_path / "global_step_5" / "actor" / "reference")] * bool(held or every)
    policy.bias.data += 1  # a job of another trainer mode wrote its policy over that of step 4
    if held:
        with pytest.raises(reference.PatchError, match="was not saved beside this policy"):
            job._load_checkpoint()
