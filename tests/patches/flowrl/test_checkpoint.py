"""The partition function through verl's checkpoints: saved, resumed, exported and merged."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flow_lab
import machine
import pytest
import torch

pytestmark = pytest.mark.verl

ACTOR = "actor_rollout_ref.actor"
ADAM = (
    *f"{ACTOR}.optim.optimizer=AdamW {ACTOR}.optim.lr=1e-2 {ACTOR}.optim.lr_scheduler_type=cosine".split(),
    *f"{ACTOR}.optim.total_training_steps=10 {ACTOR}.optim.weight_decay=0.01 {ACTOR}.ppo_micro_batch_size_per_gpu=4".split(),
)
WHOLE = f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
KINDS = [("fsdp", 1), ("fsdp", 2), ("fsdp2", 2)]
MARKED = [pytest.param(kind, ranks, marks=[pytest.mark.full] if ranks > 1 else []) for kind, ranks in KINDS]
MODEL = "actor_rollout_ref.model"
ADAPTERS = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora.merge=True", *ADAM)


EXPORTED = [("fsdp", 1), ("fsdp2", 2)]
"""Without an accelerator FSDP1 cannot gather a whole state dict from two ranks, for stock verl either."""


def cases(strategy: str, ranks: int) -> list[dict[str, Any]]:
    overrides = (*ADAM, f"{ACTOR}.strategy={strategy}")
    whole = (WHOLE,) if (strategy, ranks) in EXPORTED else ()
    options = {"options": {"lr": 0.05}}
    names = {part: f"{strategy}-{part}" for part in ("whole", "half", "rest", "saved")}
    return [
        {"name": names["whole"], "overrides": overrides, "steps": 2, **options},
        {"name": names["half"], "overrides": [*overrides, *whole], "save": names["saved"], **options},
        {"name": names["rest"], "overrides": overrides, "load": names["saved"], "first": 1, **options},
    ]


def with_adapters() -> list[dict[str, Any]]:
    """On one rank, FSDP1 and FSDP2: two steps, and one, a checkpoint and another one."""
    found = []
    for strategy in ("fsdp", "fsdp2"):
        overrides, saved = (*ADAPTERS, f"{ACTOR}.strategy={strategy}"), f"lora-{strategy}-saved"
        found += [
            {"name": f"lora-{strategy}-whole", "overrides": overrides, "steps": 2, "apart": True},
            {"name": f"lora-{strategy}-half", "overrides": overrides, "save": saved},
            {"name": f"lora-{strategy}-rest", "overrides": overrides, "load": saved, "first": 1},
        ]
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    """A folder per number of ranks, made when it is asked for."""
    from flashpatch.verify.probes.flowrl import tiny

    class Folders(dict[int, Path]):
        def __missing__(self, ranks: int) -> Path:
            folder = self[ranks] = tmp_path_factory.mktemp(f"ranks-{ranks}")
            tiny.write_model(folder / "model")
            tokenizer().save_pretrained(folder / "model")
            wanted = [case for kind, number in KINDS if number == ranks for case in cases(kind, ranks)]
            flow_lab.run(folder, [*(with_adapters() if ranks == 1 else []), *wanted], ranks)
            return folder

    return Folders()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), eos_token="a")


def test_a_partition_function_is_loaded_beside_its_own_model_alone(tmp_path):
    """A job without the name flowrl writes its model over, and leaves what lay beside."""
    from safetensors.torch import save_file

    from flashpatch.patches.flowrl import actor, checkpoint

    head, file = torch.nn.Linear(2, 2), tmp_path / checkpoint.FOLDER / checkpoint.FILE
    for value in (0.0, 1.0):
        save_file({"w": torch.full((3,), value)}, tmp_path / "model.safetensors")
        checkpoint.keep(
            {f"proj_z.{name}": tensor + 1 for name, tensor in head.state_dict().items()}, tmp_path
        )
        before = head.weight.clone()
        actor._restore(head, file)
        assert torch.equal(head.weight, before + 1)
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(actor.PatchError, match="was not saved beside this model.*move the file away"):
        actor._restore(head, file)


@pytest.mark.parametrize("kind, ranks", MARKED)
def test_resuming_equals_going_on(done, kind, ranks):
    whole, rest = (flow_lab.result(done[ranks], f"{kind}-{part}", ranks) for part in ("whole", "rest"))
    assert flow_lab.furthest(rest["after"], whole["after"]) == 0  # optimizer state and rates included
    assert rest["metrics"][0]["actor/tb_loss"] == whole["metrics"][1]["actor/tb_loss"]
    assert flow_lab.furthest(rest["before"], whole["before"]) > 0


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_resuming_with_adapters_equals_going_on(done, kind):
    whole, rest = (flow_lab.result(done[1], f"lora-{kind}-{part}") for part in ("whole", "rest"))
    assert flow_lab.furthest(rest["after"], whole["after"]) == 0
    moved = [name for name, value in rest["before"].items() if not value.equal(whole["before"][name])]
    assert sum("proj_z" in name for name in moved) == 10 and any("lora_B" in name for name in moved)


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_adapters_that_are_sent_apart_leave_the_head_out(done, kind):
    """As for engines that merge adapters themselves: first all weights without them, later they alone."""
    seen = flow_lab.result(done[1], f"lora-{kind}-whole")
    base, adapters = seen["exported"]
    whole = [name for name in seen["before"] if "proj_z" not in name and "lora_" not in name]
    assert len(base) == len(whole) and not [name for name in base if "proj_z" in name or "lora_" in name]
    assert all("lora_" in name for name in adapters)
    assert len(adapters) == 28


@pytest.mark.parametrize("kind, ranks", [MARKED[0], MARKED[2]])
def test_the_exported_model_is_the_policy_alone(done, kind, ranks):
    from safetensors.torch import load_file

    saved = flow_lab.result(done[ranks], f"{kind}-half", ranks)["after"]
    model = done[ranks] / f"{kind}-saved" / "huggingface"
    exported = {n: t for file in model.glob("*.safetensors") for n, t in load_file(file).items()}
    assert set(exported) == {name for name in saved if "proj_z" not in name}
    beside = load_file(model / "flowrl" / "proj_z.safetensors")
    assert (
        flow_lab.furthest(
            {f"proj_z.{n}": t for n, t in beside.items()}, {n: t for n, t in saved.items() if "proj_z" in n}
        )
        == 0
    )


@pytest.mark.full
@pytest.mark.parametrize("kind, ranks", EXPORTED)
def test_the_merged_model_is_the_policy_alone_and_an_actor_goes_on_from_it(done, kind, ranks):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = done[ranks]
    places = ("--local_dir", folder / f"{kind}-saved", "--target_dir", folder / f"{kind}-merged")
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp", *places]
    merged = machine.run(command, 900, env=flow_lab.environment(folder, FLASHPATCH="cpu,bf16,flowrl"))
    assert merged.returncode == 0, merged.stdout[-3000:] + merged.stderr[-5000:]
    model, seen = AutoModelForCausalLM.from_pretrained(
        folder / f"{kind}-merged", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not seen["unexpected_keys"] and not seen["missing_keys"]
    beside = load_file(folder / f"{kind}-merged" / "flowrl" / "proj_z.safetensors")
    saved = flow_lab.result(folder, f"{kind}-half", ranks)["after"]
    assert all(torch.equal(saved[f"proj_z.{n}"].bfloat16(), tensor) for n, tensor in beside.items())
    flow_lab.run(folder, [{"name": "again", "model": f"{kind}-merged", "overrides": [*ADAM]}])
    again = flow_lab.result(folder, "again")["before"]
    assert all(torch.equal(again[f"proj_z.{n}"], tensor.float()) for n, tensor in beside.items())
    assert "the partition function is loaded from" in flow_lab.tail(folder)
