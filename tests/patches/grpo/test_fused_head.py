"""verl's fused log-probabilities meet a head that FSDP2 has sharded, and models whose logits are more than a product with it."""

import grpo_lab
import pytest

pytestmark = pytest.mark.verl

LOGITS = """
import sys, torch, transformers
from verl.models.transformers.monkey_patch import apply_monkey_patch, patch_forward_with_backends
small = dict(vocab_size=71, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
caps = dict(head_dim=8, sliding_window=4, final_logit_softcapping=30.0)
KINDS = {
    "qwen2": {}, "granite": dict(logits_scaling=1.0), "granite scaled": dict(logits_scaling=4.0), "phi": {},
    "gemma2": dict(caps, final_logit_softcapping=None), "gemma2 capped": caps, "cohere": {}, "mixtral": dict(output_router_logits=True),
}
for kind, own in KINDS.items():
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind.split()[0], **small, **own))
    if getattr(model.lm_head, "bias", None) is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    try:
        for _ in range(2):  # a reference has the same class, and verl changes that for good
            patch_forward_with_backends(model.bfloat16(), use_fused_kernels=True, fused_kernels_backend="torch")
        print("TAKEN", kind)
    except Exception as error:
        print("REFUSED", kind, error)
rope = dict(rope_theta=1e4, rope_type="default", mrope_section=[1, 1, 2])
seen = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32)
images = transformers.AutoConfig.for_model("qwen2_5_vl", text_config={**small, "rope_parameters": rope}, vision_config=seen)
model = transformers.AutoModelForImageTextToText.from_config(images)
apply_monkey_patch(model, use_remove_padding=True, ulysses_sp_size=1, use_fused_kernels=True, fused_kernels_backend="torch")
print("TAKEN images")
"""


@pytest.mark.parametrize("name", ["grpo", "flowrl"])
def test_a_model_is_asked_for_its_own_logits_and_refused_if_they_are_others(tmp_path, name):
    done = grpo_lab.python(LOGITS, tmp_path, FLASHPATCH=name)
    said = [line for line in done.stdout.splitlines() if line.startswith(("TAKEN", "REFUSED"))]
    taken = [line.removeprefix("TAKEN ") for line in said if line.startswith("TAKEN")]
    assert taken == ["qwen2", "granite", "gemma2", "mixtral", "images"], grpo_lab.tail(done)
    assert len(said) == 9 and all("use_fused_kernels=False" in line for line in said if "REFUSED" in line)


RANKS = """
    import copy
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from torch.distributed.device_mesh import init_device_mesh
    import flashpatch
    flashpatch.enable("grpo", logprobs=True)
    from verl.models.transformers.monkey_patch import patch_forward_with_backends
    from verl.utils.fsdp_utils import apply_fsdp2
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**small, num_key_value_heads=2, tie_word_embeddings=False))
    plain, ids = copy.deepcopy(model), [torch.arange(8)[None] + 9 * one for one in range(world)]
    for one in ids:
        logits = plain(input_ids=one).logits[:, :-1].log_softmax(-1)
        (logits.gather(-1, one[:, 1:, None]).sum() / world).backward()
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    apply_fsdp2(model, {"mesh": init_device_mesh("cpu", (world,))}, {})
    model(input_ids=ids[rank], labels=ids[rank], return_dict=True).log_probs[:, :-1].sum().backward()
    found = {name: one.grad.full_tensor() for name, one in model.named_parameters()}
    print(max(float((found[name] - one.grad).norm() / one.grad.norm()) for name, one in plain.named_parameters()))
"""


def test_its_gradient_is_averaged_over_ranks(tmp_path):
    for said in grpo_lab.ranks(RANKS, tmp_path, 2):
        assert float(said.strip().splitlines()[-1]) < 1e-5
