"""Which channels can exchange a scale: by the table, and as the models of transformers compute."""

import profile_lab
import pytest
import torch

from flashpatch import PatchError
from flashpatch.patches.fp8.calibration import structure
from flashpatch.patches.fp8.calibration.profile_file import Profile

KV = tuple(int(x) for head in (0, 0, 1, 1) for x in range(head * 16, head * 16 + 16))
BLOCK = "model.layers.1"


def found(config, shapes) -> dict[str, structure.Exchange]:
    return {e.producer.removeprefix(f"{BLOCK}."): e for e in structure.exchanges(config, BLOCK, shapes)}


@pytest.mark.parametrize("family", structure.TABLE)
def test_a_model_computes_the_same_after_every_exchange_of_its_type(family: str) -> None:
    model = profile_lab.random_model(family).float().eval()
    weights = model.state_dict()
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    exchanges = found(model.config.to_dict(), shapes)
    wanted = {"input_layernorm"}
    if not family.endswith("moe") and family != "mixtral":  # there it feeds the router too
        wanted.add("post_attention_layernorm")
        if family in ("gemma2", "gemma3_text"):
            wanted = {"input_layernorm", "pre_feedforward_layernorm"}
    if family != "phi3":  # a part of a fused layer gives up nothing
        wanted |= {"self_attn.v_proj"} | ({"mlp.up_proj"} if len(wanted) == 2 else set())
        assert exchanges["self_attn.v_proj"].index == {f"{BLOCK}.self_attn.o_proj": KV}
    assert set(exchanges) == wanted
    smooth = {e.producer: torch.rand(shapes[f"{e.producer}.weight"][0]) + 0.5 for e in exchanges.values()}
    profile = Profile("int8", "channel", "", shapes, tuple(exchanges.values()), smooth, frozenset())
    ids = torch.arange(32).reshape(1, 32)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        model.load_state_dict({name: profile.smoothed(name, w) for name, w in weights.items()})
        after = model(input_ids=ids).logits
    assert torch.allclose(before, after, atol=1e-4 * float(before.abs().max()))


class TestSizes:
    SHAPES = {
        f"{BLOCK}.{name}.weight": shape
        for name, shape in {
            "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64),
            "mlp.up_proj": (96, 64),
            "mlp.down_proj": (64, 96),
        }.items()
    }

    def test_own_heads_are_fed_one_to_one(self) -> None:
        shapes = {**self.SHAPES, f"{BLOCK}.self_attn.v_proj.weight": (64, 64)}
        assert found({"model_type": "llama"}, shapes)["self_attn.v_proj"].index == {}

    @pytest.mark.parametrize("heads", [None, 0, 3, 1, "4", True])
    def test_heads_that_do_not_fit(self, heads) -> None:
        with pytest.raises(PatchError, match="Check that config.json belongs to the weights"):
            found({"model_type": "llama", "num_attention_heads": heads}, self.SHAPES)

    def test_layers_that_do_not_fit(self) -> None:
        with pytest.raises(PatchError, match=r"up_proj: feeds 96 channels to layers of \[80\]"):
            found(
                {"model_type": "llama", "num_attention_heads": 4},
                {**self.SHAPES, f"{BLOCK}.mlp.down_proj.weight": (64, 80)},
            )
