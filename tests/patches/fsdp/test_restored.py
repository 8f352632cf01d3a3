"""A policy that verl has put back in place computes with the weights that were put back, whatever it computed before."""

from __future__ import annotations

import grpo_lab
import pytest

pytest.importorskip("torch")

CODE = """
    from itertools import product
    from pathlib import Path
    from types import SimpleNamespace as Some
    import flashpatch
    flashpatch.enable("cpu", "bf16", "fsdp")
    import transformers
    import verl.workers.engine
    from verl.experimental.separation.engine_workers import DetachActorWorker
    from flashpatch.verify.probes.grpo import job

    folder = Path(os.environ["FOLDER"])
    if rank == 0:
        job.tiny(folder / "model")
    dist.barrier()
    plain = transformers.Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = job.rows(plain)

    def computed(engine):
        data = job.share(rows, len(rows), {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 8})
        with engine.eval_mode():
            return torch.cat(engine.infer_batch(data)["model_output"]["log_probs"].unbind())

    both = [True, False]
    cases = [("fsdp", {"use_orig_params": orig, "reshard_after_forward": reshard}) for orig, reshard in product(both, both)]
    cases += [("fsdp2", {"reshard_after_forward": reshard}) for reshard in both]
    cases += [(strategy, {"fsdp_size": 1}) for strategy in ("fsdp", "fsdp2")]
    wrong = []
    for strategy, settings in cases:
        engine = job.engine_for(strategy, folder / "model", **settings)
        worker = object.__new__(DetachActorWorker)
        worker._strategy_handlers, worker.actor = None, Some(engine=engine)
        worker.config = Some(actor=Some(strategy=strategy))
        old = computed(engine)
        try:
            worker.save_model_to_cpu(0)
            with engine.train_mode():
                engine.optimizer_zero_grad()
                data = job.share(rows, len(rows), job.SPLITS["all at once"])
                engine.forward_backward_batch(data, job.loss_function("vanilla", "token-mean"))
                engine.optimizer.param_groups[0]["lr"] = 1.0
                engine.optimizer_step()
            new = computed(engine)
            worker.save_model_to_cpu(1)
            for number, wanted in enumerate((old, new)):
                worker.restore_model_from_cpu(number)
                far = float((computed(engine) - wanted).abs().max())
                if far > 1e-5 or torch.allclose(old, new):
                    wrong.append(f"{strategy} {settings} {number}: {far:.2g} away")
        except Exception as error:
            wrong.append(f"{strategy} {settings}: {type(error).__name__} {str(error)[:200]}")
    assert not wrong, "\\n".join(["", *wrong])
"""


@pytest.mark.verl
def test_a_policy_that_was_put_back_computes_as_it_did(tmp_path):
    grpo_lab.ranks(CODE, tmp_path, 2, FOLDER=str(tmp_path))
