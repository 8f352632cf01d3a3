"""The adapter of a model under FSDP1 leaves the trainer, whatever PEFT finds behind the wrappers."""

import cpu_lab
import pytest

pytestmark = pytest.mark.verl

CODE = """
import functools
from importlib.metadata import version
import torch
import torch.distributed as dist
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Qwen2Config, Qwen2ForCausalLM
import flashpatch
from verl.utils import fsdp_utils
dist.init_process_group("gloo", init_method="file://{folder}/meet", rank=0, world_size=1)
sizes = dict(vocab_size=97, hidden_size=48, intermediate_size=71, num_attention_heads=4, num_key_value_heads=2)
model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=1, **sizes))
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
parts = {{name.replace(".default", ""): part.detach().clone() for name, part in model.named_parameters() if "lora_" in name}}
policy = fsdp_utils.get_fsdp_wrap_policy(model, is_lora=True)
wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
export = lambda: fsdp_utils.collect_lora_params(wrapped, layered_summon=False, base_sync_done=True)
stock = fsdp_utils.collect_lora_params
assert (len(export()) == 0) == (Version(version("peft")) >= Version("0.21"))
flashpatch.enable("cpu", "bf16")
found = export()
assert found.keys() == parts.keys(), sorted(found)
assert all(torch.equal(found[name], part) for name, part in parts.items())
base = fsdp_utils.collect_lora_params(wrapped, layered_summon=False, base_sync_done=False)
assert not any("lora_" in name for name in base) and "model.embed_tokens.weight" in base
flashpatch.disable()
assert fsdp_utils.collect_lora_params is stock
"""


def test_an_adapter_under_fsdp1_is_exported_whole(tmp_path):
    cpu_lab.checked(CODE.format(folder=tmp_path), tmp_path)
