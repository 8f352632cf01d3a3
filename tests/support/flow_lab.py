"""What the tests of this folder share: jobs of one or two ranks that step verl's own actor worker."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import warm
from cpu_lab import environment
from machine import limit

JOB = Path(__file__).with_name("flow_job.py")
LIMIT = limit(900)  # seconds
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
PACKED, RECOMPUTED = f"{MODEL}.use_remove_padding=True", f"{MODEL}.enable_gradient_checkpointing=True"
FSDP1, FSDP2 = f"{ACTOR}.strategy=fsdp", f"{ACTOR}.strategy=fsdp2"


def run(folder: Path, cases: Sequence[Mapping[str, Any]], ranks: int = 1, **extra: str) -> None:
    """Run `flow_job` on ``cases``; each rank must end well."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"cases-{ranks}.json").write_text(json.dumps(list(cases)))
    run_ranks([str(JOB), str(folder), f"cases-{ranks}.json"], folder, ranks, **extra)


def run_ranks(command: Sequence[str], folder: Path, ranks: int, **extra: str) -> None:
    """Run a Python script in as many processes, which meet as torchrun's do; each must end well."""
    meet = folder / f"meet-{ranks}"
    meet.unlink(missing_ok=True)
    settings = {"FLASHPATCH": "cpu,bf16,flowrl", "WORLD_SIZE": str(ranks)}
    settings |= {"DIST_INIT_METHOD": f"file://{meet}", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    own = [{**settings, "RANK": str(rank), "LOCAL_RANK": str(rank), **extra} for rank in range(ranks)]
    commands = [(command, environment(folder, **one)) for one in own]
    done = warm.run_together(warm.VERL_VLLM, commands, cwd=folder, timeout=LIMIT)
    for rank, one in enumerate(done):
        (folder / f"rank-{rank}-of-{ranks}.log").write_text(one.stdout + one.stderr)
    assert not any(one.returncode for one in done), tail(folder, ranks)


def run_plan(
    script: str, folder: Path, ranks: int, cases: Sequence[Mapping[str, Any]], **extra: str
) -> dict[str, Any]:
    """Let a script of this folder carry out cases on so many ranks; return what the first rank kept of each."""
    plan = folder / f"cases-{ranks}.json"
    plan.write_text(json.dumps(cases))
    run_ranks([str(Path(__file__).with_name(script)), str(folder), plan.name], folder, ranks, **extra)
    return {case["name"]: torch.load(folder / f"{case['name']}-0.pt") for case in cases}


def stepped(worker: Any, batch: Callable[[], Any], rows: Sequence[Any]) -> dict[str, Any] | None:
    """Let verl's actor worker train on a batch of these rows; return the log-probabilities of the answers before, and the weights'
    step; None where verl returns none: of ranks that share each row it lets the first alone."""
    from flashpatch.verify.probes.flowrl import tiny

    before = tiny.weights(worker.actor.engine)
    output = worker.compute_log_prob(batch())
    worker.update_actor(batch())
    after = tiny.weights(worker.actor.engine)
    if output is None:
        return None
    parts = output["log_probs"].unbind()  # jagged, a value per token of prompt and answer
    logs = [part[len(row.prompt) - 1 : -1] for part, row in zip(parts, rows, strict=True)]
    return {"logs": torch.cat(logs), "step": {name: before[name] - after[name] for name in before}}


@contextlib.contextmanager
def forced(record: torch.Tensor, layers: Iterable[int]) -> Iterator[None]:
    """Let the model's own code choose as recorded: ``torch.topk`` returns the ids of ``record`` [tokens, layers, experts],
    layer after layer."""
    original, calls = torch.topk, iter(layers)

    def topk(values: torch.Tensor, k: int, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = record[:, next(calls)].long()
        return values.gather(-1, ids), ids

    torch.topk = topk
    try:
        yield
    finally:
        torch.topk = original


def tail(folder: Path, ranks: int = 1) -> str:
    """The ends of the ranks' logs, for a failed assertion."""
    logs = (folder / f"rank-{rank}-of-{ranks}.log" for rank in range(ranks))
    return "\n".join(log.read_text(errors="replace")[-5000:] for log in logs)


def result(folder: Path, name: str, ranks: int = 1) -> dict[str, Any]:
    """What rank 0 wrote of a case."""
    return torch.load(folder / f"{name}-{ranks}.pt", weights_only=True)


def gradient(seen: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """By how much plain descent at rate 1 moved each weight."""
    return {name: seen["before"][name].double() - seen["after"][name].double() for name in seen["before"]}


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
    """FlowRL's step from the weights ``seen`` before it, in float64, one response at a time, without verl; ``layers`` of log Z, 0 without it.

    Returns:
        The gradient by name, the loss, and each response's log Z."""
    from flashpatch.verify.probes.flowrl import tiny

    torch.manual_seed(0)
    model = tiny.untrained(tie_word_embeddings=tied, attn_implementation="eager").double()
    own = {name: value.double() for name, value in seen["before"].items()}
    model.load_state_dict({n: v for n, v in own.items() if "proj_z" not in n}, strict=not tied)
    head = {n: v.clone().requires_grad_() for n, v in own.items() if "proj_z" in n}
    losses, log_zs = [], []
    for at, row in enumerate(tiny.responses()):
        ids = torch.tensor([[*row.prompt, *row.answer]])
        hidden = model.model(ids).last_hidden_state
        logp = model.lm_head(hidden)[0].log_softmax(-1)
        answer = logp[len(row.prompt) - 1 : -1].gather(1, torch.tensor(row.answer)[:, None])[:, 0]
        x = hidden[0, : len(row.prompt)].mean(0)
        x = x.detach() if detach else x if layers else x.new_zeros(1)
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


def furthest(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of two sets of weights, relative to the largest value of each weight."""
    assert set(one) == set(other), set(one) ^ set(other)
    return max(
        float(
            (one[name].double() - other[name].double()).abs().max()
            / other[name].double().abs().max().clamp(min=1e-3)
        )
        for name in one
    )
