"""Values that are derived from several layers: by a layer processed last, by the model's own hook, by load_weights."""

import fp8_toy_derived as derived
import fp8_toys as toys
import pytest
import torch
from torch import nn

from flashpatch.errors import PatchError

A, B, C = (toys.checkpoint(seed) for seed in range(3))


class Hooked(toys.Model):
    """A model whose hook packs the blocks' weights: once, and the parameters that it has read are dropped."""

    again = False  # whether the hook derives anew each time, and keeps its parameters

    def __init__(self, method: str = "bare") -> None:
        super().__init__(method)
        self.packed = None

    def load_weights(self, weights):
        loaded = super().load_weights(weights)
        self.process_weights_after_loading()
        return loaded

    def process_weights_after_loading(self) -> None:
        if self.packed is None or self.again:
            self.packed = [block.down.weight.data.clone() * 2 for block in self.layers]
            if not self.again:
                for block in self.layers:
                    block.down.weight = None

    def forward(self, tokens):
        x = self.embed.weight[tokens]
        for block, packed in zip(self.layers, self.packed):
            q, k, v = block.qkv(block.norm(x)).chunk(3, dim=-1)
            x = x + torch.tanh(block.attn(q) * k + v) @ packed.T
        return x @ self.lm_head.weight[: toys.VOCAB].T


class HookedAgain(Hooked):
    again = True


class Wrapped(toys.Model):
    """A model around one that has the hook: only the inner load calls it."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.inner = Hooked()

    def load_weights(self, weights):
        return self.inner.load_weights(weights)

    def forward(self, tokens):
        return self.inner(tokens)


class Summing(toys.Model):
    """A model whose load_weights derives a tensor after its loop."""

    total = None

    def load_weights(self, weights):
        loaded = super().load_weights(weights)
        self.total = self.embed.weight.sum(0)
        return loaded

    def forward(self, tokens):
        return super().forward(tokens) + self.total.sum()


class Listing(toys.Model):
    """A model whose load_weights leaves a table that looks layers up when it is asked, as SGLang's Qwen3-MoE does."""

    def __init__(self) -> None:
        super().__init__("quantized")
        self.embed.rows = torch.arange(3)  # what is found on the way to a layer is not derived

    def load_weights(self, weights):
        loaded = super().load_weights(weights)
        if not hasattr(self, "table"):
            self.table = Later(lambda: [block.down for block in self.layers])
        return loaded


class Later:
    """A value that is made when it is asked for."""

    def __init__(self, make) -> None:
        self.make = make


class Told(toys.Method):
    """Post-processing scales by what the loader has set beside tensors: an attribute, or an entry."""

    def __init__(self) -> None:
        self.table = {"factor": 1.0}

    def process(self, layer: nn.Module) -> None:
        layer.weight.data.mul_(layer.factor * self.table["factor"])


class Telling(toys.Model):
    """A model whose loader sets a number: for each layer's post-processing, of the whole model, or as a sum over all loads."""

    told, all, loads = 2.0, 1.0, 0

    def __init__(self, where: str) -> None:
        super().__init__("bare")
        self.where = where
        for block in self.layers:
            block.down.quant_method, block.down.factor = Told(), 1.0

    def load_weights(self, weights):
        if self.where == "whole":
            self.all = self.told
        elif self.where == "tokens":  # as SGLang's EAGLE-3 keeps those of its drafts
            self.all = torch.full((3,), int(self.told))
        elif self.where == "sum":
            self.loads += 1

        def telling():
            for name, tensor in weights:
                if ".down." in name:
                    down = self.layers[int(name.split(".")[1])].down
                    if self.where == "attribute":
                        down.factor = self.told
                    elif self.where == "entry":
                        down.quant_method.table["factor"] = self.told
                yield name, tensor

        return super().load_weights(telling())


@pytest.mark.parametrize("told", [2.0, None])
@pytest.mark.parametrize("where", ["attribute", "entry", "whole", "tokens", "attribute of dummy weights"])
def test_numbers_that_the_loader_sets_are_the_engines_and_others_are_refused(where, told, atomic):
    """They were in use at once, before the commit, and stayed if the update was given up; those silently that the first load had not
    been seen to set: it set the very object that was there (``told`` None), or there was none."""

    def made():
        model = Telling(where.split()[0])
        down = model.layers[0].down
        same = down.quant_method.table["factor"] if where == "entry" else down.factor
        model.told = told if told and first else same
        return model

    first = None if "dummy" in where else A
    engine = toys.Engine(made(), first, atomic=atomic)
    for weights in (B, C):
        engine.update(weights)
        assert same_as_fresh(engine, made(), weights)
    before, kept = toys.state(engine.model), engine.model.all
    was, engine.model.told = engine.model.told, 3.0
    with pytest.raises(PatchError, match="would be other numbers.*new engine"):
        engine.update(A)
    assert engine.model.all is kept
    engine.check_failed(before)
    engine.model.told = was
    engine.update(B)
    assert same_as_fresh(engine, made(), B)


def test_what_a_loader_adds_up_is_refused(atomic):
    """It went on from the last policy."""
    engine = toys.Engine(Telling("sum"), A, atomic=atomic)
    with pytest.raises(PatchError, match="Telling.loads would be other numbers"):
        engine.update(B)


@pytest.mark.parametrize("first", [None, 0.0, 1])
def test_numbers_of_post_processing_are_the_policys(first, atomic):
    """Also if the first policy's was the very object that the constructor had set."""

    class Largest(toys.Method):
        def process(self, layer: nn.Module) -> None:
            largest = float(layer.weight.abs().max())
            layer.factor = largest if first != 1 else 1 + (largest != of_a)

    def made() -> toys.Model:
        model = toys.Model("bare")
        for block in model.layers:
            block.down.quant_method, block.down.factor = Largest(), first
        return model

    of_a = float(dict(A)["layers.0.down.weight"].abs().max())
    engine = toys.Engine(made(), A, atomic=atomic)
    engine.update(B)
    assert [one.down.factor for one in engine.model.layers] == [
        one.down.factor for one in toys.Engine(made(), B).model.layers
    ]


def hooked_in(model: nn.Module) -> Hooked:
    return getattr(model, "inner", model)


def process_and_hook(model: nn.Module) -> None:
    """What an engine does after its first load."""
    toys.process_all(model)
    hooked_in(model).process_weights_after_loading()


def same_as_fresh(engine, made, weights) -> bool:
    return toys.same_answers(engine.model, toys.Engine(made, weights).model)


def absorbing(kind: str, method: str) -> derived.Model:
    """A model of which attention holds values of other layers, as MLA and attention sinks do."""
    return derived.Model(method, 2, kind)


def policy(kind: str, seed: int) -> list[tuple[str, torch.Tensor]]:
    return list(derived.checkpoint(seed, 2, kind).items())


def derived_at(model: nn.Module, kind: str) -> list[int]:
    attentions = [block.attn for block in model.layers]
    return [(one.impl.sinks if kind == "sinks" else one.absorbed).data_ptr() for one in attentions]


@pytest.mark.parametrize("kind", ["absorbed", "sinks"])
@pytest.mark.parametrize("method", ["bare", "transposed", "quantized", "closure"])
def test_layers_processed_last_see_the_new_values(method, kind, atomic):
    """With quantized MLA and attention sinks, atomic=model derived them from the old layers."""
    engine = toys.Engine(absorbing(kind, method), policy(kind, 0), atomic=atomic)
    places = derived_at(engine.model, kind)
    for seed in (1, 2):
        engine.update(policy(kind, seed))
        assert same_as_fresh(engine, absorbing(kind, method), policy(kind, seed))
    assert derived_at(engine.model, kind) == places


@pytest.mark.parametrize("made", [Hooked, HookedAgain, Wrapped])
@pytest.mark.parametrize("seed", [0, None], ids=["loaded", "dummy"])
def test_what_the_models_hook_derives_is_derived_again(made, seed, atomic):
    """A hook with a guard kept what it had packed of the old weights."""
    engine = toys.Engine(made(), None if seed is None else A, process_and_hook, atomic=atomic)
    hooked = hooked_in(engine.model)
    places = [packed.data_ptr() for packed in hooked.packed]
    for weights in (B, C):
        weights = [item for item in weights if seed is not None or not item[0].endswith("bias")]
        for bucket in toys.cut(weights, 3, 8):
            engine.load(bucket)
        engine.managed.finish()
        assert same_as_fresh(engine, made(), weights)
    assert places == [packed.data_ptr() for packed in hooked.packed]


@pytest.mark.parametrize("made", [Hooked, HookedAgain])
def test_a_hook_that_fails_is_undone_or_broken(made, atomic):
    engine = toys.Engine(made(), A, atomic=atomic)
    before = toys.state(engine.model)
    original = made.process_weights_after_loading

    class Failing(made):
        def process_weights_after_loading(self):
            original(self)
            self.packed[0].zero_()
            raise MemoryError("no room")

    engine.managed._hooks._originals[engine.model] = Failing.process_weights_after_loading.__get__(
        engine.model
    )
    with pytest.raises(MemoryError):
        engine.update(B)
    engine.check_failed(before)
    engine.managed._hooks._originals[engine.model] = original.__get__(engine.model)
    engine.update(C)
    assert same_as_fresh(engine, made(), C)


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("seed", [0, None], ids=["loaded", "dummy"])
def test_a_model_whose_load_weights_derives_is_refused(seed, named, atomic):
    """On dummy weights a named update was taken; the question what its loader derives left an answer in the model."""
    engine = toys.Engine(Summing(), None if seed is None else A, atomic=atomic)
    total = engine.model.total
    with pytest.raises(PatchError, match="load_weights of Summing derives Summing.total"):
        if named:
            engine.managed.begin()
        engine.load(B)
    assert engine.model.total is total and engine.managed.version == 0


class Pairing(toys.Model):
    """A model whose loader keeps one tensor until another one comes, as vLLM's MiMo-V2 keeps a weight for its scale, or, in a table
    of the constructor's, SGLang's experts do."""

    def __init__(self, early: bool) -> None:
        super().__init__("bare")
        if early:
            self.waits = {}

    def load_weights(self, weights):
        self.waits = getattr(self, "waits", {})

        def paired():
            for name, tensor in weights:
                layer, other = name.rpartition(".down.")[0], name.replace(".q.", ".down.")
                if ".q." in name:
                    self.waits[other.rpartition(".down.")[0]] = name, tensor
                else:
                    yield from [self.waits.pop(layer)] if layer in self.waits else []
                    yield name, tensor

        return super().load_weights(paired())


@pytest.mark.parametrize("early", [True, False], ids=["constructor", "loader"])
@pytest.mark.parametrize("seed", [0, None], ids=["loaded", "dummy"])
def test_what_a_loader_would_keep_for_a_later_call_is_refused(seed, early, atomic):
    """It was paired with the other half of the next policy if its own update was given up, and was a view of a buffer."""
    engine = toys.Engine(Pairing(early), None if seed is None else A, atomic=atomic)
    cut = [name for name, _ in B].index("layers.0.q.weight") + 1
    with pytest.raises(PatchError, match="keeps tensors in a dict for a later call.*in one call"):
        engine.load(B[:cut])
    assert not engine.model.waits
    engine.update(C)
    assert same_as_fresh(engine, Pairing(early), C)


class Deleting(Hooked):
    """A model whose hook deletes the layers that it has packed, as vLLM's vision tower of dots3_note does."""

    def process_weights_after_loading(self) -> None:
        if self.packed is None:
            super().process_weights_after_loading()
            for block in self.layers:
                del block.down


@pytest.mark.parametrize("seed", [0, None], ids=["loaded", "dummy"])
def test_a_hook_that_deletes_layers_is_refused(seed, atomic):
    """The loader ended with a KeyError, and under atomic=layer no later update helped."""
    engine = toys.Engine(Deleting(), None if seed is None else A, process_and_hook, atomic=atomic)
    before = engine.model(toys.TOKENS)
    for act in (lambda: engine.load(B[:2]), engine.managed.begin, lambda: engine.update(C)):
        with pytest.raises(PatchError, match="post-processing deletes layers.0.down, layers.1.down. Open"):
            act()
        assert engine.managed.may_generate and torch.equal(engine.model(toys.TOKENS), before)


def test_a_table_that_looks_layers_up_later_is_not_derived(atomic):
    engine = toys.Engine(Listing(), A, atomic=atomic)
    engine.update(B)
    assert same_as_fresh(engine, Listing(), B)


def test_hooks_are_given_back():
    model = Hooked()
    managed = toys.manage(model)
    assert "process_weights_after_loading" in vars(model)
    managed.remove_hooks()
    assert "process_weights_after_loading" not in vars(model)


class Scaled(toys.Method):
    """Writes a value derived from the weight into a tensor that the constructor made, in place."""

    def __init__(self) -> None:
        self.scale = torch.zeros(())

    def process(self, layer: nn.Module) -> None:
        self.scale.copy_(layer.weight.abs().max())

    def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return super().apply(layer, x) * self.scale


class InABuffer(toys.Method):
    """Writes the weight into a buffer that no checkpoint has, too large for its initial values to be kept."""

    def process(self, layer: nn.Module) -> None:
        layer.table[: layer.weight.numel()].copy_(layer.weight.detach().flatten())

    def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return super().apply(layer, x) * layer.table.abs().max()


@pytest.mark.parametrize("method", [Scaled, InABuffer])
def test_a_tensor_that_processing_writes_in_place_keeps_its_value_until_the_commit(method, monkeypatch):
    """Under atomic=model it changed while the old policy was served, and stayed so where processing then failed."""
    monkeypatch.setitem(toys.METHODS, "scaled", method)
    if method is InABuffer:
        made = toys.Linear.__init__

        def with_table(self, *args, **more) -> None:
            made(self, *args, **more)
            self.register_buffer("table", torch.zeros(20000), persistent=False)

        monkeypatch.setattr(toys.Linear, "__init__", with_table)
    engine = toys.engine("scaled", atomic="model")
    engine.fail_to_process(B)
    assert engine.managed.may_generate
    assert toys.same_answers(engine.model, toys.fresh("scaled", A))
    engine.managed.begin()
    engine.load(B[:-1])
    assert engine.managed.may_generate
    assert toys.same_answers(engine.model, toys.fresh("scaled", A))
    engine.load(B[-1:])
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh("scaled", B))


class Lazy(toys.Attention):
    """Derives a number in its first forward and keeps it, as FlashInfer's attention does with scales of the KV cache."""

    def __init__(self, source: toys.Linear) -> None:
        super().__init__(source)
        self.factor = None

    def forward(self, x):
        if self.factor is None:
            self.factor = self._scale_float * 2
        return super().forward(x) * self.factor


class LazyModel(toys.Model):
    def __init__(self) -> None:
        super().__init__()
        for block in self.layers:
            block.attn = Lazy(block.qkv)


SCALED = [toys.checkpoint(seed, scales=True) for seed in range(3)]


def lazy(**keywords):
    engine = toys.Engine(LazyModel(), SCALED[0], **keywords)
    engine.model(toys.TOKENS)
    return engine


def test_one_that_captured_graphs_hold_is_refused_if_its_scales_change(atomic):
    engine = lazy(atomic=atomic, quantized_cache=lambda: True, captured=lambda: True)
    scales = [item for item in SCALED[0] if item[0].endswith("k_scale")]
    with pytest.raises(PatchError, match=r"k_scale changed, and layers.0.attn.factor.* captured CUDA graphs"):
        engine.update(SCALED[1])
    kept = list({**dict(SCALED[1]), **dict(scales)}.items())
    engine.update(kept)
    assert same_as_fresh(engine, LazyModel(), kept)


def test_one_that_a_neighbours_scale_gives_is_refused_if_that_changes(atomic):
    """FlashInfer's attention rounds its output for the next layer, by the scale of that layer's input."""

    class Rounding(Lazy):
        def forward(self, x):
            self.factor = float(self.sources[0].input_scale) if self.factor is None else self.factor
            return super().forward(x)

    model = toys.Model()
    for block in model.layers:
        block.down.input_scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)
        block.attn = Rounding(block.down)
    first, second = (
        [*weights, *((f"layers.{i}.down.input_scale", torch.tensor(scale)) for i in range(2))]
        for weights, scale in ((A, 2.0), (B, 3.0))
    )
    engine = toys.Engine(model, first, atomic=atomic, quantized_cache=lambda: True, captured=lambda: True)
    engine.model(toys.TOKENS)
    with pytest.raises(
        PatchError, match=r"down.input_scale changed, and layers.0.attn.factor.* captured CUDA"
    ):
        engine.update(second)
    engine.update(list({**dict(second), **dict(first[-2:])}.items()))
    assert engine.managed.may_generate


def test_scales_of_a_cache_that_running_requests_keep_may_not_change(atomic):
    running = [True]
    more = dict(quantized_cache=lambda: True, busy=lambda: running[0])
    engine = lazy(atomic=atomic, in_flight="keep", **more)
    with pytest.raises(PatchError, match="k_scale changed while requests run .* in_flight to recompute"):
        engine.update(SCALED[1])
    running[0] = False
    engine.update(SCALED[1])
    assert same_as_fresh(engine, LazyModel(), SCALED[1])
