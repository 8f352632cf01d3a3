"""A KV connector keeps KV beside the engine's own cache: a commit resets it, or nothing is generated."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm(least="0.32")

EXTRA = list(reversed(engines.PROMPTS[0]))  # the prompt of the request that runs during an update


def recalled(a: str, b: str, connector: str, folder: str, **more: Any) -> dict[str, Any]:
    """Greedy tokens of A, again without the prefix cache, and of B after an update; resets and loads at each point."""
    import kv_connectors

    options = more.pop("options", {})
    Path(folder).mkdir(exist_ok=True)
    kw = dict(
        kv_transfer_config=kv_connectors.config(connector, Path(folder), **more),
        enable_prefix_caching=True,
        block_size=32,
    )
    found: dict[str, Any] = dict(loads=[], resets=[])

    def note() -> None:
        found["loads"].append(kv_connectors.Silent.loads)
        found["resets"].append(kv_connectors.Forgetting.resets)

    kv_connectors.Silent.loads = kv_connectors.Forgetting.resets = 0
    with opened("bf16", a, options=options, **kw) as llm:
        found["a"] = engines.greedy(llm)
        note()
        llm.llm_engine.engine_core.engine_core.scheduler.reset_prefix_cache()
        found["again"] = engines.greedy(llm)
        note()
        if options.get("in_flight") == "keep":
            engines.add(llm, "900000", EXTRA, 64)
            engines.step(llm, 3)
        engines.inner_model(llm).load_weights(models.weights(b))
        found["error"] = updates.error(lambda: found.update(b=engines.greedy(llm), extra=_extra(llm)))
        note()
    return found


def _extra(llm: Any) -> list[int]:
    [output] = llm.generate({"prompt_token_ids": EXTRA}, engines.sampling(16), use_tqdm=False)
    return engines.tokens_of(output)


def fresh(model: str) -> list[list[int]]:
    with engines.open_llm(model) as llm:
        return [*engines.greedy(llm), _extra(llm)]


@pytest.fixture(scope="module")
def policies(runner: scenario.Runner) -> Iterator[dict[str, Any]]:
    paths = [updates.checkpoint("qwen2", seed) for seed in (0, 1)]
    a, b = (runner(fresh, path) for path in paths)
    assert all(x != y for x, y in zip(a, b, strict=True))
    yield dict(paths=paths, a=a[:-1], b=b[:-1], extra=b[-1])


def test_a_commit_resets_the_connector(runner: scenario.Runner, policies: Any, tmp_path: Path) -> None:
    got = runner(recalled, *policies["paths"], "Forgetting", str(tmp_path / "kv"))
    assert got["a"] == got["again"] == policies["a"]
    assert got["loads"] == [0, 4, 4], "nothing came back from the connector before, or something after"
    assert got["resets"] == [0, 0, 1]
    assert got["error"] is None and got["b"] == policies["b"]


@pytest.mark.full
@pytest.mark.parametrize("connector", ["Forgetting", "Late"])
def test_requests_that_keep_their_kv_are_refused_beside_a_connector(
    runner: scenario.Runner, policies: Any, tmp_path: Path, connector: str
) -> None:
    folder = str(tmp_path / "kv")
    got = runner(recalled, *policies["paths"], connector, folder, options=dict(in_flight="keep"))
    assert f"in_flight='keep' cannot be combined with {connector}" in (got["error"] or "")


@pytest.mark.parametrize(
    ("connector", "more", "says"),
    [
        ("Silent", {}, "Silent does not implement reset_cache()"),
        ("Forgetting", dict(answer="error"), "could not be reset: AssertionError"),
        pytest.param("Forgetting", dict(answer=False), "could not be reset", marks=pytest.mark.full),
    ],
)
def test_one_that_cannot_be_reset_is_refused_by_name(
    runner: scenario.Runner, policies: Any, tmp_path: Path, connector: str, more: Any, says: str
) -> None:
    got = runner(recalled, *policies["paths"], connector, str(tmp_path / "kv"), **more)
    assert "PatchError" in got["error"] and says in got["error"]
