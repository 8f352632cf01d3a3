"""A drafter trained here, loaded by a real vLLM engine: what it agrees on there is accepted there."""

import json
import os
import sys
from importlib.util import find_spec

import machine
import pytest
import torch
from drafter_lab import FAMILIES, capture, cut, embeddings_of, make_target, publish
from transformers import AutoModelForCausalLM

from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.export import load_weights, save_drafter
from flashpatch.patches.eagle.train.pack import pack
from flashpatch.patches.eagle.train.trainer import Recipe, Trainer

pytestmark = [pytest.mark.vllm, pytest.mark.full]

LARGE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
ENGINE = """
import json, sys
import flashpatch
flashpatch.enable("eagle", strict=True, adapt=False, history=False)
from vllm import LLM, SamplingParams
target, method, drafter, trained, prompts, steps = *sys.argv[1:5], json.loads(sys.argv[5]), 2
llm = LLM(
    model=target, dtype="float32", max_model_len=128, max_num_seqs=4, enforce_eager=True,
    disable_log_stats=False, enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20,
    skip_tokenizer_init=True, speculative_config={"method": method, "model": drafter,
    "num_speculative_tokens": steps},
)
sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
def measure():
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    found = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    drafts = found["vllm:spec_decode_num_drafts"].value
    first = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values[0]
    return first, drafts, [list(one.outputs[0].token_ids) for one in done]
one, drafts, tokens = measure()
said = {"first": one / drafts, "tokens": tokens}
if trained != drafter:
    said["update"] = llm.collective_rpc("eagle_update_drafter", args=(trained, 1))
    two, both, again = measure()
    said |= {"untrained": said["first"], "first": (two - one) / (both - drafts), "same": again == tokens}
print("FOUND " + json.dumps(said))
"""


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("family", "kind", "published"),
    [("llama", "eagle", False), ("qwen2", "eagle", False), ("llama", "eagle3", False)]
    + [(family, "eagle3", True) for family in FAMILIES],
)
def test_first_drafts_are_accepted_as_often_as_the_trained_drafter_agrees(family, kind, published, tmp_path):
    """A published one, of a vocabulary of 40 of 64 tokens, is trained while the engine runs with it as it was."""
    layers = 8 if kind == "eagle3" else 2
    target = make_target(family, **LARGE, num_hidden_layers=layers, initializer_range=0.15)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    target.save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    samples = capture(target, 8)
    own = publish(tmp_path / "own", target.config, 40) if published else ""
    config = drafter_config(target.config, kind, own=own)
    target_embeddings = embeddings_of(target)
    drafter = make_drafter(config)
    if own:
        load_weights(drafter, own)
    trainer = Trainer(drafter, target_embeddings, Recipe(rate=3e-3, tokens=0.5))
    if kind == "eagle3":
        samples = [_with_layers(target, sample) for sample in samples]
    rows = pack(cut(samples, auxiliary=kind == "eagle3"), 400)
    for _ in range(80):
        trainer.step(rows)
    agreement = trainer.backward(rows)["agreement"]
    assert agreement > (0.45 if published else 0.6)  # what is not in its vocabulary it cannot draft
    folder = save_drafter(tmp_path / "drafter", trainer.weights(), config, "vllm", target_embeddings, own=own)
    prompts = [sample.input_ids[:4].tolist() for sample in samples]
    command = [
        sys.executable,
        "-c",
        ENGINE,
        tmp_path / "target",
        kind,
        own or folder,
        folder,
        json.dumps(prompts),
    ]
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
    done = machine.run(command, 400, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))[6:])
    assert said["tokens"] == [sample.input_ids[4:].tolist() for sample in samples]
    print(kind, family, "agreement", agreement, "accepted first drafts", said)
    if published:
        assert said["update"][0]["tensors"] == 15 and said["same"] and said["untrained"] < 0.2
    assert said["first"] == pytest.approx(agreement, abs=0.15)


@torch.no_grad()
def _with_layers(target, sample):
    """vLLM's default layers for EAGLE-3: the states before layers 2, n / 2 and n - 3."""
    from dataclasses import replace

    count = target.config.num_hidden_layers
    states = target.model(sample.input_ids[None, :-1], output_hidden_states=True).hidden_states
    layers = torch.cat([states[layer][0] for layer in (2, count // 2, count - 3)], dim=-1)
    return replace(sample, auxiliary=torch.cat((layers, torch.zeros(1, layers.shape[1]))))
