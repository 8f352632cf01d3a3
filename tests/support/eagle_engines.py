"""Write targets and drafters for tests on SGLang, and name the keywords of engines on them."""

import json
from pathlib import Path
from typing import Any

import sglang_lab as lab  # noqa: F401  for the tests, which find it here

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
#: The same without speculation.
PLAIN = {name: value for name, value in SPECULATIVE.items() if not name.startswith("speculative")}


def target(root: Path, weight: float, seed: int = 0, sharp: float = 1.0) -> str:
    """Write a Qwen2 in float32 whose layers count for ``weight``; at 0 the next token depends on the last one alone.

    ``sharp`` multiplies its logits, which are of standard deviation 1.3: at 3 a few tokens have most of the mass."""
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
    return str(place)


def drafter(root: Path, of: str, name: str, exact: bool) -> str:
    """Write an EAGLE drafter for a target: ``exact`` for one whose layers count for nothing, else random."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig

    from flashpatch.patches.eagle.train.drafter import make_drafter
    from flashpatch.patches.eagle.train.drafter_config import drafter_config
    from flashpatch.patches.eagle.train.export import save_drafter

    place = root / name
    if place.exists():
        return str(place)
    config = drafter_config(AutoConfig.from_pretrained(of))
    weights = make_drafter(config, seed=len(name)).state_dict()
    if exact:
        # What the target's head reads is a multiple of its last norm's weight times the token's embedding.
        norm = load_file(Path(of) / "model.safetensors")["model.norm.weight"].float()
        weights["fc.weight"] = torch.cat([torch.diag(norm), torch.zeros(len(norm), len(norm))], 1)
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"layers.0.{part}.weight"].zero_()
    return str(save_drafter(place, weights, config, "sglang"))


def target3(root: Path) -> Path:
    """Write a Llama of 32 tokens whose next token nearly always depends on the last one alone."""
    from flashpatch.verify.probes.eagle import tiny

    place = root / "target3"
    return place if place.exists() else tiny.target(place, layers=8, adds=0.004)


def drafter3(root: Path, name: str, follows: bool) -> Path:
    """Write an EAGLE-3 drafter for `target3`, in float32.

    Where it ``follows``, its projection takes each token's embedding to that of the token after it, and its layer adds
    nothing: its first draft is right where the target is a chain, later ones where tokens repeat. Else it is random."""
    import torch
    from drafter_lab import publish
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    place = root / name
    if place.exists():
        return place
    publish(place, AutoConfig.from_pretrained(target3(root)))
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
