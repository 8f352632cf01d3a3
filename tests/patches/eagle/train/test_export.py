import json

import pytest
import torch
from drafter_lab import FAMILIES, embeddings_of, make_target
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.train import export
from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.export import load_weights, save_drafter
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_is_written_as_the_engine_reads_it_and_read_back(family, kind, engine, tmp_path):
    target = make_target(family)
    config = drafter_config(target.config, kind)
    drafter = make_drafter(config, seed=1)
    target_embeddings = embeddings_of(target)
    folder = save_drafter(tmp_path / "d", drafter.state_dict(), config, engine, target_embeddings)
    written = load_file(folder / "model.safetensors")
    plain = json.loads((folder / "config.json").read_text())
    extra = set(written) - set(drafter.state_dict())
    if kind == "eagle3":
        assert extra == {"lm_head.weight"} and plain["architectures"] == ["LlamaForCausalLMEagle3"]
        assert plain["draft_vocab_size"] == plain["vocab_size"] == 64
    elif engine == "sglang":
        assert extra == {"fc.bias"} and not written["fc.bias"].any()
        assert plain["architectures"] == [f"{'Qwen2' if family == 'qwen2' else 'Llama'}ForCausalLMEagle"]
    else:
        assert not extra and plain["architectures"] == ["LlamaForCausalLM"] and plain["model_type"] == "llama"
        assert plain.get("qkv_bias", False) is (family == "qwen2")
    assert plain["num_hidden_layers"] == 1 and plain["rope_theta"] > 0
    other = make_drafter(config, seed=2)
    load_weights(other, folder)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), other.parameters(), strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_full_disk_leaves_the_drafter_that_was_there(tmp_path, monkeypatch):
    target = make_target()
    config = drafter_config(target.config)
    drafter = make_drafter(config)
    folder = save_drafter(tmp_path / "d", drafter.state_dict(), config, "vllm")
    before = (folder / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_drafter(folder, make_drafter(config, seed=5).state_dict(), config, "vllm")
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_file_that_is_no_such_drafter_is_refused(tmp_path):
    target = make_target()
    config = drafter_config(target.config)
    drafter = make_drafter(config)
    weights = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    with pytest.raises(PatchError, match="cannot be read"):
        load_weights(drafter, tmp_path)
    for wrong, says in (
        ({**weights, "fc.bias": torch.ones(32)}, "bias on fc"),
        ({name: weights[name] for name in list(weights)[1:]}, "fc.weight"),
        ({**weights, "fc.weight": torch.ones(2, 2)}, "fc.weight"),
    ):
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(PatchError, match=says):
            load_weights(drafter, tmp_path)


def test_targets_that_are_not_known_are_refused():
    with pytest.raises(PatchError, match="gpt2.*llama, qwen2, qwen3"):
        drafter_config(GPT2Config())


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_come_from_the_targets_checkpoint(tied, tmp_path):
    target = make_target(tie_word_embeddings=tied)
    target.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")  # not in the index
    target_embeddings = TargetEmbeddings.load(tmp_path)
    assert torch.equal(target_embeddings.embedding, target.model.embed_tokens.weight)
    assert torch.equal(target_embeddings.head, target.lm_head.weight)
    assert (target_embeddings.to(dtype=torch.float64).head is target_embeddings.to().embedding) is False
    with pytest.raises(PatchError, match="no model.embed_tokens"):
        TargetEmbeddings.load(tmp_path / "nowhere")
