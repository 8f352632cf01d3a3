"""Updates under a snapshot CUDA graph, over real fp8 layers.

Needs only torch, pytest and flashpatch on the path (``pip install -e . --no-deps``), and a GPU with fp8
(capability 8.9 or newer) or, started by `vllm/cuda/test_graph.py`, the fake device.
"""

import gc

import pytest

torch = pytest.importorskip("torch")


from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit.loader_adapter import LoaderAdapter
from flashpatch.patches.fp8.refit.managed_model import ManagedModel

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU with fp8", allow_module_level=True)

HIDDEN, SHARDS, BLOCKS, BATCH = 512, 3, 4, 32
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
CUDA = torch.device("cuda")


def load_shard(param: torch.Tensor, loaded: torch.Tensor, shard: int) -> None:
    param.data.narrow(0, shard * HIDDEN, HIDDEN).copy_(loaded)


class Kernel:
    """Keeps what `torch._scaled_mm` needs outside parameters: the layout and the scale of the weight."""

    def __init__(self) -> None:
        self.operands: dict[str, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scale = (x.abs().amax().float() / LARGEST).clamp(min=1e-12)
        quantized = (x / scale).clamp(-LARGEST, LARGEST).to(FP8)
        return torch._scaled_mm(
            quantized,
            self.operands["weight"],
            scale_a=scale,
            scale_b=self.operands["scale"],
            out_dtype=torch.bfloat16,
        )


class Linear(torch.nn.Module):
    """bf16 [shards * HIDDEN, HIDDEN] at birth; after processing an fp8 parameter [HIDDEN, shards * HIDDEN]."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        weight = torch.empty(shards * HIDDEN, HIDDEN, dtype=torch.bfloat16, device=CUDA)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.weight.weight_loader = load_shard
        self.kernel = Kernel()

    def process(self) -> None:
        weight = self.weight.detach()
        scale = (weight.abs().amax().float() / LARGEST).clamp(min=1e-12)
        quantized = (weight / scale).clamp(-LARGEST, LARGEST).to(FP8)
        self.weight = torch.nn.Parameter(quantized.t(), requires_grad=False)
        self.register_buffer("weight_scale", scale)
        self.kernel.operands = {"weight": self.weight.detach(), "scale": scale}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(x)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Linear(SHARDS)
        self.down = Linear(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(SHARDS, dim=-1)
        return x + self.down((torch.tanh(q) * k + v).contiguous())


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(BLOCKS))

    def load_weights(self, weights) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            block, part = name.rsplit(".", 1)
            fused, shard = ("down", 0) if part == "down" else ("qkv", "qkv".index(part))
            param = params[f"{block}.{fused}.weight"]
            param.weight_loader(param, tensor, shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def checkpoint(seed: int) -> list[tuple[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [
        (
            f"layers.{i}.{part}",
            (torch.randn(HIDDEN, HIDDEN, generator=random) / HIDDEN**0.5).to(torch.bfloat16),
        )
        for i in range(BLOCKS)
        for part in ("q", "k", "v", "down")
    ]


def process(module: torch.nn.Module) -> None:
    if isinstance(module, Linear):
        module.process()


class Snapshot:
    """A model and a graph of its forward on ``x``."""

    def __init__(self, model: Model, x: torch.Tensor) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), torch.no_grad():
            self.output = model(x)

    def answer(self) -> torch.Tensor:
        self.graph.replay()
        torch.cuda.synchronize()
        return self.output.clone()


def fresh(weights) -> Model:
    model = Model()
    model.load_weights(weights)
    for module in model.modules():
        process(module)
    return model


def managed(weights, atomic: str) -> tuple[Model, ManagedModel]:
    model = Model()
    adapter = LoaderAdapter(CUDA)
    adapter.process = process
    follower = ManagedModel(model, adapter, {"atomic": atomic, "partial": False, "in_flight": "refuse"})
    follower.load(model.load_weights, weights)
    for module in model.modules():
        process(module)
    follower.end_first_load()
    return model, follower


def addresses(model: Model) -> dict[str, tuple[int, int]]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            tensors |= {f"{name}.{key}": value for key, value in module.kernel.operands.items()}
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors.items()}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(9)).to(CUDA, torch.bfloat16)


@pytest.mark.parametrize("cuts", [(), (1, 6, 11)], ids=["whole", "buckets"])
@pytest.mark.parametrize("atomic", ["layer", "model"])
def test_replay_after_an_update_equals_a_fresh_capture(atomic, cuts, x, capsys):
    model, follower = managed(checkpoint(0), atomic)
    engine, before = Snapshot(model, x), addresses(model)
    assert torch.equal(engine.answer(), Snapshot(fresh(checkpoint(0)), x).answer())
    for seed in (1, 2, 1, 0):
        weights = checkpoint(seed)
        oracle = Snapshot(fresh(weights), x).answer()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        edges = [0, *cuts, len(weights)]
        for first, end in zip(edges, edges[1:]):
            follower.load(model.load_weights, weights[first:end])
        follower.finish()
        peak = torch.cuda.max_memory_allocated() - held
        assert torch.equal(engine.answer(), oracle)
        assert addresses(model) == before
    whole = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    with capsys.disabled():
        print(
            f"\natomic={atomic}, {len(cuts) + 1} bucket(s): peak {peak / 2**20:.1f} MiB over "
            f"{whole / 2**20:.1f} MiB of weights"
        )


def test_a_failed_update_under_atomic_model_leaves_the_graph_as_it_was(x):
    model, follower = managed(checkpoint(0), "model")
    engine = Snapshot(model, x)
    answer = engine.answer()

    def broken_off():
        yield from checkpoint(1)[:9]
        raise ConnectionError("the sender died")

    with pytest.raises(ConnectionError):
        follower.load(model.load_weights, broken_off())
    assert torch.equal(engine.answer(), answer) and follower.may_generate


@pytest.mark.parametrize("atomic", ["layer", "model"])
def test_an_update_within_a_capture_is_refused(atomic, x):
    """By name and before anything is written: the policy in use stays, and the next update is as any."""
    model, follower = managed(checkpoint(0), atomic)
    engine = Snapshot(model, x)
    answer = engine.answer()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(PatchError, match="a CUDA graph is being captured"):
            follower.load(model.load_weights, checkpoint(1))
    assert torch.equal(engine.answer(), answer) and follower.may_generate
    follower.load(model.load_weights, checkpoint(1))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(PatchError, match="a CUDA graph is being captured"):
            follower.finish()
    follower.finish()
    assert torch.equal(engine.answer(), Snapshot(fresh(checkpoint(1)), x).answer())


def test_no_growth(x):
    model, follower = managed(checkpoint(0), "layer")
    engine = Snapshot(model, x)
    for update in range(20):
        follower.load(model.load_weights, checkpoint(update % 3))
        follower.finish()
        engine.answer()
        if update == 2:
            held = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() <= held
