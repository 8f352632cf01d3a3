"""`examples/flowrl_exact`: the worlds' targets by brute force, gradients by hand, and that training gets there."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "examples" / "flowrl_exact"
NAMES = (
    "worlds",
    "policies",
    "measures",
    "methods",
    "training",
    "small_model",
    "experiments",
    "report",
    "plot",
)


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


def policy(exact, world, seeds=2):
    kind = exact.policies.Tree if world.name == "strings" else exact.policies.Table
    return kind(world, seeds)


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


def picked(exact, world, method, learner, seed=0):
    """Samples of the policy, and its log-probabilities of them with gradient."""
    tokens = learner.answers()[0].detach()
    draw = torch.Generator().manual_seed(seed)
    shape = (*tokens.shape[:2], 6)
    which = torch.randint(tokens.shape[2], shape, generator=draw)
    exact_z = world.log_z(method.beta, method.length)
    return which, exact.training.sampled(world, tokens, which, exact_z)


def solved(free, share):
    """The z at which the average of ``exp(share * (free - z))`` is 1; all answers are of one length here."""
    return math.log(math.fsum(math.exp(share * value) for value in free) / len(free)) / share


@pytest.mark.parametrize("length", ["mean", "sum"])
@pytest.mark.parametrize("log_z", ["learned", "exact", "mean", "group"])
def test_the_loss_has_the_gradient_of_the_formula(exact, length, log_z):
    """The package's loss on a table, against 2 w residual d log p / |y| written out; log Z's is 2 w residual."""
    world, beta = small(exact), 2.0
    method = exact.methods.Method("", beta=beta, length=length, log_z=log_z, reward="raw", weight="raw")
    learner = exact.policies.Table(world, 1)
    with torch.no_grad():
        learner.logits += torch.randn(learner.logits.shape, generator=torch.Generator().manual_seed(1))
        learner.log_z_table += 0.3
    which, samples = picked(exact, world, method, learner)
    shift = 0.1 * torch.randn(
        learner.logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    with torch.no_grad():
        learner.logits += shift  # the policy has moved on since it sampled
    exact.methods.loss(method, samples, *learner.chosen(which), learner.log_z()).sum().backward()

    share = 3 if length == "mean" else 1
    log_p = learner.logits.detach().log_softmax(-1)[0]
    reference = world.reference.sum(-1)
    old = (samples.old.sum(-1))[0]
    logits, table = torch.zeros_like(log_p), torch.zeros(2, dtype=torch.float64)
    for prompt in range(2):
        mine = which[0, prompt].tolist()
        free = [
            beta * float(world.reward[prompt, y])
            - (float(old[prompt, i]) - float(reference[prompt, y])) / share
            for i, y in enumerate(mine)
        ]
        z = {
            "learned": 0.3,
            "exact": float(world.log_z(beta, length)[prompt]),
            "mean": math.fsum(free) / len(free),
            "group": solved(free, share),
        }[log_z]
        for i, y in enumerate(mine):
            weight = math.exp(float(log_p[prompt, y]) - float(old[prompt, i]))
            away = float(log_p[prompt, y]) - float(reference[prompt, y])
            residual = z + away / share - beta * float(world.reward[prompt, y])
            step = 2 * weight * residual / len(mine) / 2
            table[prompt] += step
            logits[prompt] -= step / share * log_p[prompt].exp()
            logits[prompt, y] += step / share
    assert torch.allclose(learner.logits.grad[0], logits, rtol=1e-9, atol=1e-12)
    if log_z == "learned":
        assert torch.allclose(learner.log_z_table.grad[0], table, rtol=1e-9)
    else:
        assert learner.log_z_table.grad is None


def test_measures_by_hand(exact):
    half, quarter = torch.tensor([[[0.5, 0.5, 0.0]], [[0.25, 0.25, 0.5]]], dtype=torch.float64)
    assert float(exact.measures.total_variation(half, quarter)) == pytest.approx(0.5)
    assert float(exact.measures.divergence(half, quarter)) == pytest.approx(math.log(2))
    assert float(
        exact.measures.effective_number(quarter, torch.tensor([[True, True, False]]))
    ) == pytest.approx(2)
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


def test_a_network_is_a_policy_too(exact):
    """One step of the transformer with the package's partition function; log Z has a gradient, and moves it."""
    model = exact.small_model.Transformer()
    world = exact.small_model.world_of(model)
    assert torch.allclose(
        world.reference.sum(-1).exp().sum(-1), torch.ones(8, dtype=torch.float64), atol=1e-5
    )
    learner = exact.small_model.Learner(model, 0)
    which = torch.randint(300, (1, 8, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for whole, part in zip(learner.answers(), learner.chosen(which), strict=True):
            assert torch.allclose(whole.gather(2, which[..., None].expand(1, 8, 5, 3)), part, atol=1e-6)
    run = exact.training.train(world, learner, exact.methods.Method("", rate=1e-3), 1)
    assert float(run.curve("variation")[0]) > 0 and run.steps == [0, 1]
    before = exact.small_model.Learner(model, 0).partition.state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in learner.partition.state_dict().items())


@pytest.mark.slow
def test_a_table_and_a_page_are_made_of_results(exact, tmp_path):
    import compare

    jobs = compare.jobs(quick=True)
    one = [job for job in jobs if job.part != "transformer"]
    results = [compare.run(compare.Job(job.part, job.method, 2, 3)) for job in one]
    network = next(job for job in jobs if job.part == "transformer")
    done = compare.run(compare.Job("transformer", network.method, 1, 2))
    names = [job.method.name for job in jobs if job.part == "transformer"]
    results += [{**done, "method": {**done["method"], "name": name}} for name in names]
    told = exact.report.tables(results)
    for heading in exact.report.HEADINGS.values():
        assert heading in told
    for job in jobs:
        assert job.method.name.partition(" @ ")[0] in told
    found = exact.plot.numbers(results)
    assert set(found["kept"]) == set(exact.plot.PATHS.values())
    assert set(found["network"]) == set(exact.plot.NETWORK)
    assert all(0 <= mean <= 1 for mean, _ in found["terms"].values())
    pytest.importorskip("matplotlib")
    compare.finish({tmp_path / "page.png": found})
    assert (tmp_path / "page.png").stat().st_size > 20_000 and (tmp_path / "page.json").exists()
