"""`examples/flowrl_exact`: the worlds' targets by brute force, gradients by hand, and that training gets there."""

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "flowrl_exact"
NAMES = tuple("worlds policies measures methods training small_model experiments report plot".split())


@pytest.fixture(scope="module")
def exact():
    """The example's modules, which find each other as scripts do."""
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    torch.set_num_threads(threads)
    sys.path[:] = path
    for name in {*NAMES, "expressions", "compare"} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.fixture(params=["expressions", "strings"])
def world(exact, request):
    return getattr(exact.worlds, request.param)()


def small(exact):
    """Two prompts with twelve answers each, four of them right, of three tokens."""
    draw = torch.Generator().manual_seed(3)
    reference = torch.randn(2, 12, generator=draw, dtype=torch.float64).log_softmax(-1)
    reward = torch.zeros(2, 12, dtype=torch.float64)
    reward[:, :4] = 1
    tokens = (reference / 3)[..., None].expand(2, 12, 3).clone()
    return exact.worlds.World("small", tokens, torch.ones(12, 3, dtype=torch.bool), reward)


@pytest.mark.parametrize("beta", [0.5, 5.0])
@pytest.mark.parametrize("length", ["mean", "sum"])
def test_the_target_is_the_tilted_reference(exact, world, beta, length):
    """Term by term in plain numbers: the sum is 1, and every residual of the loss is zero."""
    target = world.target(beta, length)
    log_z = world.log_z(beta, length)
    for prompt in range(len(world.reward)):
        assert math.fsum(target[prompt].tolist()) == pytest.approx(1, abs=1e-9)
        for answer in range(0, target.shape[1], 7):
            tokens = int(world.mask[answer].sum()) if length == "mean" else 1
            log_reference = math.fsum(world.reference[prompt, answer].tolist())
            gain = beta * float(world.reward[prompt, answer]) - float(log_z[prompt])
            wanted = math.exp(log_reference) * math.exp(tokens * gain)
            assert float(target[prompt, answer]) == pytest.approx(wanted, rel=1e-9)
    if length == "sum":
        whole = (world.reference.sum(-1).exp() * (beta * world.reward).exp()).sum(-1)
        assert log_z.exp().tolist() == pytest.approx(whole.tolist())
        assert torch.allclose(target, world.tilted(beta))


def test_measures_by_hand(exact):
    half, quarter = torch.tensor([[[0.5, 0.5, 0.0]], [[0.25, 0.25, 0.5]]], dtype=torch.float64)
    assert float(exact.measures.total_variation(half, quarter)) == pytest.approx(0.5)
    assert float(exact.measures.divergence(half, quarter)) == pytest.approx(math.log(2))
    number = exact.measures.effective_number(quarter, torch.tensor([[True, True, False]]))
    assert float(number) == pytest.approx(2)
    world = exact.worlds.expressions()
    least, beta = exact.measures.nearest(world.tilted(10**0.5).unsqueeze(0), world)
    assert float(least) < 1e-3 and float(beta) == pytest.approx(10**0.5, rel=1e-3)


def trained(exact, **changes):
    """Total variation to the target after training on the small world, four seeds."""
    world = small(exact)
    method = exact.methods.Method("", **{"rate": 0.02, "beta": 1.0, **changes})
    run = exact.training.train(world, exact.policies.Table(world, 4), method, 400)
    return run.curve("variation")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "reinforce", "beta": 3.0},
        {"log_z": "exact", "reward": "raw"},
        {"log_z": "group", "reward": "raw"},
    ],
    ids=["REINFORCE", "exact", "group"],
)
def test_training_reaches_the_target(exact, changes):
    variation = trained(exact, **changes)
    assert float(variation[0].mean()) > 0.3
    assert float(variation[-1].max()) < 0.12, variation[-1]


@pytest.mark.slow
def test_grpo_does_not(exact):
    """The same world and samples: what the test above asks for is not had for nothing."""
    assert float(trained(exact, kind="grpo")[-1].min()) > 0.2
