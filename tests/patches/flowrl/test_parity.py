"""One update in verl's own FSDP engine, however it is split and packed, against FlowRL's paper in float64."""

from collections.abc import Callable
from typing import Any

import flow_lab
import pytest
import torch
from flow_lab import ACTOR, FSDP2, MODEL, PACKED, gradient

pytestmark = pytest.mark.verl

EXACT = 2e-4  # float32 against float64, relative to the largest gradient of each weight
SAME = 1e-4  # two float32 computations in another order


def case(name: str, *overrides: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "overrides": overrides, **more}


def rows() -> Any:
    from flashpatch.verify.probes.flowrl import tiny

    return tiny.responses()


def correction() -> list[list[float]]:
    """Rollout-correction weights, equal over each response as verl's sequence weights are."""
    return [[0.5 + 0.25 * (at % 3)] * len(row.answer) for at, row in enumerate(rows())]


HALF = f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"
ADAPTERS = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=12", f"{MODEL}.lora.merge=True")
ULYSSES = (PACKED, f"{ACTOR}.ulysses_sequence_parallel_size=2")


#: By number of ranks, the cases of `make test`. What the others add repeats it with other settings.
SHORT = {
    1: {"plain", "dynamic", "raw", "corrected", "tied", "lora", "fused"},
    2: {"plain", "fsdp2-micro", "tied", "ulysses-fsdp2-micro", "lora-fsdp2"},
}


def cases(*given: str | tuple[Any, ...], ranks: int = 1) -> list[Any]:
    """Return parameters of a test; each is or begins with a case's name. Those that are not in `SHORT` are ``full``."""
    found = []
    for one in given:
        name, *rest = [one] if isinstance(one, str) else one
        marks = [] if name in SHORT[ranks] else [pytest.mark.full]
        found.append(pytest.param(name, *rest, marks=marks, id=f"{name}-{ranks}"))
    return found


Result = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What a case gave on one rank or two. Each process takes many: those of `SHORT`, and later the others."""
    from flashpatch.verify.probes.flowrl import tiny

    folder = tmp_path_factory.mktemp("parity")
    tiny.write_model(folder / "model")
    tiny.write_model(folder / "tied", tie_word_embeddings=True)
    ran = set()

    def result(name: str, ranks: int = 1) -> dict[str, Any]:
        short = name in SHORT[ranks]
        if (ranks, short) not in ran:
            ran.add((ranks, short))
            chosen = [one for one in all_cases(ranks) if (one["name"] in SHORT[ranks]) == short]
            flow_lab.run(folder, chosen, ranks)
        return flow_lab.result(folder, name, ranks)

    return result


def all_cases(ranks: int) -> list[dict[str, Any]]:
    """Return the cases of one rank, or of two."""
    one = [
        case("plain"),
        case(
            "dynamic",
            PACKED,
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu=48",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        ),
        case(
            "static",
            PACKED,
            f"{ACTOR}.fsdp_config.pad_to_length=True",
            f"{ACTOR}.fsdp_config.pad_to_length_bucket=128",
        ),
        case("checkpointing", f"{MODEL}.enable_gradient_checkpointing=True"),
        case("fsdp2", FSDP2),
        case("raw", options={"weight": "raw"}),
        case("capped", options={"weight": "raw", "weight_cap": 0.5}),
        case("none", options={"weight": "none", "length": "sum", "beta": 2.0}),
        case("detached", options={"detach_hidden": True}),
        case("corrected", extra={"rollout_is_weights": correction()}),
        case("tied", model="tied"),
        case("rates", options={"lr": 0.25, "num_layers": 1}),
        case("lora", *ADAPTERS),
        case("lora-fsdp2", FSDP2, *ADAPTERS),
        # last: verl exchanges the forward of the model's class, for good
        case("fused", f"{MODEL}.use_fused_kernels=True", f"{MODEL}.fused_kernel_options.impl_backend=torch"),
        case(
            "fused-packed",
            PACKED,
            f"{MODEL}.use_fused_kernels=True",
            f"{MODEL}.fused_kernel_options.impl_backend=torch",
        ),
    ]
    two = [
        case("plain"),
        case("micro", PACKED, f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"),
        case("fsdp2", FSDP2),
        case("fsdp2-micro", FSDP2, PACKED, f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"),
        case("hybrid", FSDP2, f"{ACTOR}.fsdp_config.fsdp_size=1"),
        case("tied", model="tied"),
        case("ulysses", *ULYSSES),
        case("ulysses-fsdp2-micro", FSDP2, *ULYSSES, f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"),
        case("lora", *ADAPTERS),
        case("lora-fsdp2", FSDP2, *ADAPTERS),
        case("root", f"{ACTOR}.fsdp_config.wrap_policy.min_num_params=100000"),
    ]
    return one if ranks == 1 else [{**c, "overrides": [HALF, *c["overrides"]]} for c in two]


def paper(
    seen: dict[str, Any],
    *,
    beta: float = 15.0,
    weight: str = "clip",
    cap: float | None = None,
    length: str = "mean",
    detach: bool = False,
    factors: list[float] | None = None,
    layers: int = 3,
    tied: bool = False,
) -> tuple[dict[str, torch.Tensor], float, list[float]]:
    """FlowRL's step from the weights ``seen`` before it, in float64, one response at a time, without verl.

    Returns:
        The gradient by name, the loss, and each response's log Z."""
    from flashpatch.verify.probes.flowrl import tiny

    torch.manual_seed(0)
    model = tiny.untrained(tie_word_embeddings=tied, attn_implementation="eager").double()
    own = {name: value.double() for name, value in seen["before"].items()}
    model.load_state_dict({n: v for n, v in own.items() if "proj_z" not in n}, strict=not tied)
    head = {n: v.clone().requires_grad_() for n, v in own.items() if "proj_z" in n}
    losses, log_zs = [], []
    for at, row in enumerate(rows()):
        ids = torch.tensor([[*row.prompt, *row.answer]])
        hidden = model.model(ids).last_hidden_state
        logp = model.lm_head(hidden)[0].log_softmax(-1)
        answer = logp[len(row.prompt) - 1 : -1].gather(1, torch.tensor(row.answer)[:, None])[:, 0]
        x = hidden[0, : len(row.prompt)].mean(0)
        x = x.detach() if detach else x
        for layer in range(layers):
            x = torch.nn.functional.linear(
                x, head[f"proj_z.net.{4 * layer}.weight"], head[f"proj_z.net.{4 * layer}.bias"]
            )
            if layer < layers - 1:
                x = torch.nn.functional.gelu(x)
                norm = f"proj_z.net.{4 * layer + 2}"
                x = torch.nn.functional.layer_norm(x, x.shape, head[f"{norm}.weight"], head[f"{norm}.bias"])
        old, ref = torch.tensor([row.old, row.ref], dtype=torch.float32).double()
        share = len(row.answer) if length == "mean" else 1
        ratio = (answer.detach() - old).sum().exp()
        w = {"clip": ratio.clamp(0.8, 1.2), "raw": ratio, "none": torch.ones(())}[weight]
        w = w if cap is None else w.clamp(max=cap)
        reward = torch.tensor(row.reward, dtype=torch.float32).double()
        residual = x.squeeze() + answer.sum() / share - beta * reward - ref.sum() / share
        losses.append((factors[at] if factors else 1.0) * w * residual.square())
        log_zs.append(x.item())
    loss = torch.stack(losses).mean()
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    if tied:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return {**found, **{n: v.grad for n, v in head.items()}}, loss.item(), log_zs


@pytest.mark.parametrize(
    "name, options",
    cases(
        ("plain", {}),
        ("raw", {"weight": "raw"}),
        ("capped", {"weight": "raw", "cap": 0.5}),
        ("none", {"weight": "none", "length": "sum", "beta": 2.0}),
        ("detached", {"detach": True}),
        ("tied", {"tied": True}),
    ),
)
def test_the_gradient_is_the_papers(result, name, options):
    seen = result(name)
    wanted, loss, log_z = paper(seen, **options)
    assert flow_lab.furthest(gradient(seen), wanted) < EXACT
    (metrics,) = seen["metrics"]
    assert metrics["actor/tb_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["actor/log_z"] == pytest.approx(sum(log_z) / len(log_z), abs=1e-5)
    assert min(float(gradient(seen)[n].abs().max()) for n in wanted) > 0  # policy and head, every weight


def test_rollout_correction_multiplies_in(result):
    seen = result("corrected")
    wanted, loss, _ = paper(seen, factors=[row[0] for row in correction()])
    assert flow_lab.furthest(gradient(seen), wanted) < EXACT
    assert seen["metrics"][0]["actor/tb_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    "name", cases("dynamic", "static", "checkpointing", "fused", "fused-packed", "fsdp2")
)
def test_one_rank_however_it_is_packed(result, name):
    seen, plain = result(name), result("plain")
    assert flow_lab.furthest(gradient(seen), gradient(plain)) < SAME
    same_metrics(seen, plain)


@pytest.mark.parametrize(
    "name",
    cases(
        *("plain", "micro", "fsdp2", "fsdp2-micro", "hybrid", "root", "ulysses", "ulysses-fsdp2-micro"),
        ranks=2,
    ),
)
def test_two_ranks_are_one(result, name):
    seen, plain = result(name, ranks=2), result("plain")
    assert flow_lab.furthest(seen["before"], plain["before"]) == 0
    assert flow_lab.furthest(gradient(seen), gradient(plain)) < SAME
    same_metrics(seen, plain)


def test_two_ranks_are_one_with_tied_embeddings(result):
    seen, plain = result("tied", ranks=2), result("tied")
    assert flow_lab.furthest(gradient(seen), gradient(plain)) < SAME


@pytest.mark.full
def test_a_rate_of_its_own(result):
    seen = result("rates")
    wanted, _, _ = paper(seen, layers=1)
    moved = gradient(seen)
    quarter = {n: g * (0.25 if "proj_z" in n else 1) for n, g in wanted.items()}
    assert flow_lab.furthest(moved, quarter) < EXACT


@pytest.mark.parametrize(
    "name, ranks", [*cases(("lora", 1), ("lora-fsdp2", 1)), *cases(("lora", 2), ("lora-fsdp2", 2), ranks=2)]
)
def test_adapters_and_the_whole_partition_function_learn(result, name, ranks):
    """Adapters start at zero: the gradient of their second matrix is the whole weight's, through the first."""
    seen, plain = result(name, ranks), gradient(result("plain"))
    moved = {unwrapped(weight): change for weight, change in gradient(seen).items()}
    adapters = [weight for weight in moved if weight.endswith("lora_B")]
    assert len(adapters) == 14  # of two layers
    scaling = 12 / 4
    first = {unwrapped(weight): value.double() for weight, value in seen["before"].items()}
    wanted = {weight: value for weight, value in plain.items() if "proj_z" in weight}
    for adapter in adapters:
        layer = adapter.removesuffix(".lora_B")
        wanted[adapter] = scaling * plain[f"{layer}.weight"] @ first[f"{layer}.lora_A"].T
    assert flow_lab.furthest({weight: moved[weight] for weight in wanted}, wanted) < SAME
    still = [change for weight, change in moved.items() if weight not in wanted]
    assert len(still) > 20 and all(float(change.abs().max()) == 0 for change in still)
    assert "proj_z" not in " ".join(seen["exported"])


def unwrapped(name: str) -> str:
    """A weight's name without what peft puts around it."""
    name = name.replace("base_model.model.", "", 1).replace(".base_layer.", ".")
    return name.replace(".lora_A.default.weight", ".lora_A").replace(".lora_B.default.weight", ".lora_B")


@pytest.mark.parametrize(
    "name, ranks",
    [*cases(("plain", 1), ("fsdp2", 1)), *cases(("plain", 2), ("fsdp2", 2), ("fsdp2-micro", 2), ranks=2)],
)
def test_nothing_of_the_head_is_exported(result, name, ranks):
    seen = result(name, ranks)
    assert seen["exported"] == sorted(n for n in seen["before"] if "proj_z" not in n)
    assert sum("proj_z" in n for n in seen["before"]) == 10


def same_metrics(seen: dict[str, Any], plain: dict[str, Any]) -> None:
    (one,), (other,) = seen["metrics"], plain["metrics"]
    names = {name for name in other if name.startswith("actor/")}
    assert {"actor/logpf", "actor/logp_ref", "actor/log_z", "actor/log_reward", "actor/tb_loss"} <= names
    for name in names:
        assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
