"""Write targets and drafters for tests on SGLang, and name the keywords of engines on them."""

import json
from pathlib import Path
from typing import Any

import sglang_lab as lab  # noqa: F401  for the tests, which find it here

HIDDEN, INNER, KV = 256, 512, 128

#: Keywords of an engine that speculates: chains of three drafts.
SPECULATIVE: dict[str, Any] = dict(
    dtype="float32",
    attention_backend="torch_native",
    prefill_attention_backend="intel_amx",
    decode_attention_backend="intel_amx",
    speculative_draft_attention_backend="intel_amx",
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
    disable_radix_cache=True,
)


def target(root: Path, weight: float, seed: int = 0, sharp: float = 1.0) -> str:
    """Write a Qwen2 in float32 whose layers count for ``weight``; at 0 the next token depends on the last one alone.

    ``sharp`` multiplies its logits, which are of standard deviation 1.3: at 3 a few tokens have most of the mass."""
    import torch
    from safetensors.torch import load_file, save_file
    from vllm_lab import models

    place = Path(models.checkpoint(root / f"weight-{weight}-{sharp}", "qwen2", seed, dtype="float32"))
    done = place / "scaled"
    if not done.exists():
        tensors = {name: tensor.float() for name, tensor in load_file(place / "model.safetensors").items()}
        for name, tensor in tensors.items():
            if "o_proj" in name or "down_proj" in name:
                tensor *= weight
            if name == "model.norm.weight":
                tensor *= sharp
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((place / "config.json").read_text())
        config["torch_dtype"] = config["dtype"] = "float32"
        (place / "config.json").write_text(json.dumps(config))
        done.touch()
    assert torch is not None
    return str(place)


def drafter(root: Path, of: str, name: str, exact: bool) -> str:
    """Write an EAGLE drafter for a target: ``exact`` for one whose layers count for nothing, else random."""
    import torch
    from safetensors.torch import load_file, save_file

    place = root / name
    if place.exists():
        return str(place)
    noise = torch.Generator().manual_seed(len(name))

    def random(*shape: int) -> torch.Tensor:
        return 0.08 * torch.randn(*shape, generator=noise)

    # What the target's head reads is a multiple of its last norm's weight times the token's embedding.
    norm = load_file(Path(of) / "model.safetensors")["model.norm.weight"].float()
    quiet = 0.0 if exact else 1.0
    at = "layers.0"
    tensors = {
        "fc.weight": torch.cat([torch.diag(norm), torch.zeros(HIDDEN, HIDDEN)], 1)
        if exact
        else random(HIDDEN, 2 * HIDDEN),
        "fc.bias": torch.zeros(HIDDEN),
        f"{at}.self_attn.q_proj.weight": random(HIDDEN, HIDDEN),
        f"{at}.self_attn.k_proj.weight": random(KV, HIDDEN),
        f"{at}.self_attn.v_proj.weight": random(KV, HIDDEN),
        f"{at}.self_attn.q_proj.bias": torch.zeros(HIDDEN),
        f"{at}.self_attn.k_proj.bias": torch.zeros(KV),
        f"{at}.self_attn.v_proj.bias": torch.zeros(KV),
        f"{at}.self_attn.o_proj.weight": random(HIDDEN, HIDDEN) * quiet,
        f"{at}.mlp.gate_proj.weight": random(INNER, HIDDEN),
        f"{at}.mlp.up_proj.weight": random(INNER, HIDDEN),
        f"{at}.mlp.down_proj.weight": random(HIDDEN, INNER) * quiet,
        f"{at}.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    place.mkdir(parents=True)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((Path(of) / "config.json").read_text())
    config |= dict(
        architectures=["Qwen2ForCausalLMEagle"], num_hidden_layers=1, torch_dtype="float32", dtype="float32"
    )
    config.pop("layer_types", None)
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


#: Layers of `target3`, of which an EAGLE-3 drafter reads the states before the third, the middle and the last but two.
LAYERS3 = 8
INNER3 = (2, LAYERS3 // 2, LAYERS3 - 3)


def target3(root: Path) -> Path:
    """Write a Llama of 32 tokens whose next token nearly always depends on the last one alone."""
    from flashpatch.verify.probes.eagle import tiny

    place = root / "target3"
    return place if place.exists() else tiny.target(place, layers=LAYERS3, adds=0.004)


def drafter3(root: Path, name: str, follows: bool) -> Path:
    """Write an EAGLE-3 drafter for `target3`, in float32.

    Where it ``follows``, its projection takes each token's embedding to that of the token after it, and its layer adds
    nothing: its first draft is right where the target is a chain, later ones where tokens repeat. Else it is random."""
    import tiny_drafters
    import torch
    from safetensors.torch import load_file, save_file

    place = root / name
    if place.exists():
        return place
    tiny_drafters.drafter3(place)
    if follows:
        own = load_file(target3(root) / "model.safetensors")
        embedding, head = own["model.embed_tokens.weight"], own["lm_head.weight"]
        normed = embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt()
        after = (normed @ head.T).argmax(-1)
        tensors = load_file(place / "model.safetensors")
        step = torch.linalg.lstsq(embedding, embedding[after]).solution.T
        tensors["fc.weight"] = torch.cat([step, torch.zeros(len(step), 2 * len(step))], 1).contiguous()
        tensors["lm_head.weight"] = head
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"midlayer.{part}.weight"].zero_()
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place
