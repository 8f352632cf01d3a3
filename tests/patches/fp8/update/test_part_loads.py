"""``load_weights`` of a model's parts, as worker extensions call it, without a session."""

import fp8_toys as toys
import pytest
import torch


class Part(toys.Block):
    """A block that loads itself, by names of its own."""

    def load_weights(self, weights) -> None:
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, tensor in weights:
            if name in ("q.weight", "k.weight", "v.weight"):
                weight = self.qkv.weight
                weight.weight_loader(weight, tensor, "qkv".index(name[0]))
            elif name == "down.weight":
                self.down.weight.weight_loader(self.down.weight, tensor, 0)
            else:
                toys.load_whole(tensors[name], tensor)


class Parts(toys.Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Part("transposed") for _ in range(2))


@pytest.mark.parametrize("session", [False, True])
def test_parts_whose_tensors_have_equal_names(atomic, session):
    engine = toys.Engine(Parts(), toys.checkpoint(0), atomic=atomic)
    for seed in (1, 2, 3):
        if session:
            engine.managed.begin()
        weights = toys.checkpoint(seed)
        for number, part in enumerate(engine.model.layers):
            path = f"layers.{number}."
            part.load_weights([(n.removeprefix(path), tensor) for n, tensor in weights if n.startswith(path)])
        engine.load([item for item in weights if not item[0].startswith("layers.")])
        if session:
            engine.managed.finish()
        else:
            engine.managed.before_request()
        assert engine.managed.version == seed
        assert toys.same_answers(engine.model, toys.fresh("transposed", toys.checkpoint(seed)))
