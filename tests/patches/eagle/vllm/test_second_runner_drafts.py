"""vLLM's second model runner ("V2"), on a CPU: what it captures, and the number of drafts that each step verifies."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagle_job_common import Cycle, controller_of, core_of, flush, generate, opened, prompts, tokens_of
from eagle_reference import states
from vllm_lab import engines, environment, scenario

from flashpatch.patches.eagle.capture.sample import Sample

pytestmark = pytest.mark.vllm
#: Before, the second runner takes no changing number of drafts; see `test_a_number_that_never_changes`.
changing = pytest.mark.vllm(least="0.25")

#: Largest difference to Hugging Face in float32, and between runners. Values are of order 1.
CLOSE = 2e-4
MOST = 3
#: Tokens of an answer after the drafter's update, from which its acceptance is seen; on V2 a step takes a tenth of a second.
AGAIN = 12

#: How often a number of drafts is asked for in turn. vLLM schedules it with the step before the one that verifies it.
NUMBERS = [2, 2, 0, 0, 3, 3, 1, 1]
HOOKS = ("execute_model", "sample_tokens", "execute_model_v2", "sample_tokens_v2")


def speculate(at: str, target: str, asynchronous: bool, adapt: bool, method: str, model: str):
    """Speculate with another number of drafts every other step; then update the drafter, if one is named "exact".

    Per step, in the order of their outputs: the number that was chosen for the next one, and how many drafts each
    request verified. Without ``adapt`` the number is always the largest."""
    import flashpatch
    from flashpatch.patches.eagle.capture.sample_queue import SampleReader

    if asynchronous:
        engines.schedule_a_step_ahead()
    folder = Path(at)
    flashpatch.enable("eagle", strict=True, samples=f"{at}/queue", adapt=adapt)
    llm = opened(folder / target, Path(model), method, MOST, max_num_batched_tokens=48)
    core, controller = core_of(llm), controller_of(llm) or SimpleNamespace(drafts=0, accepted=0)
    controller.policy = policy = Cycle(NUMBERS)
    steps: list[Any] = []
    update = core.scheduler.update_from_output

    def noted(step: Any, *rest: Any) -> Any:
        lengths = [len(step.scheduled_spec_decode_tokens.get(name, ())) for name in step.num_scheduled_tokens]
        if lengths:
            steps.append([step.num_spec_tokens_to_schedule, lengths])
        return update(step, *rest)

    core.scheduler.update_from_output = noted

    def ask(tokens: int) -> list[list[int]]:
        return tokens_of(generate(llm, prompts()[:4], max_tokens=tokens))

    found: dict[str, Any] = dict(tokens=ask(30), steps=list(steps), asynchronous=core.async_scheduling)
    found["runner"] = type(engines.inner_runner(llm)).__module__
    found["learned"] = sorted({arm for _, arm, _ in policy.updates})
    if model.endswith("exact"):
        found["again"], found["lengths"] = [], []
        controller.policy = Cycle([MOST])
        for other in (None, "noise"):
            if other:
                llm.collective_rpc("eagle_update_drafter", args=(f"{at}/{other}", 1))
            drafts, accepted = controller.drafts, controller.accepted
            found["again"].append(ask(AGAIN))
            found["lengths"].append(1 + (controller.accepted - accepted) / max(1, controller.drafts - drafts))
    else:
        ask(1)  # carries the final tokens of the requests before
    found["counts"] = flush(llm, folder)
    found["calls"] = [flashpatch.status()[f"eagle.vllm.{name}"].calls for name in HOOKS]
    for number, sample in enumerate(SampleReader(folder / "queue").read_samples(1000)):
        sample.save(folder / f"sample-{number}.safetensors")
    llm.llm_engine.engine_core.shutdown()
    flashpatch.disable("eagle")
    return found


# --- the tests


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, models: Path):
    """What `speculate` found in an interpreter of its own, and the samples that were captured; run once each."""
    kept: dict[str, tuple[dict[str, Any], list[Sample]]] = {}

    def run(
        runner: str, target: str, method: str, drafter: str, asynchronous: bool = False, adapt: bool = True
    ) -> tuple[dict[str, Any], list[Sample]]:
        from flashpatch.verify.probes.eagle import tiny

        key = f"{runner}-{target}-{method}-{asynchronous}-{adapt}"
        if key not in kept:
            at = tmp_path_factory.mktemp(key)
            for model in models.iterdir():
                (at / model.name).symlink_to(model)
            env = {**tiny.ENVIRONMENT, **(environment.V2 if runner == "V2" else {})}
            ledger = {"FLASHPATCH_LEDGER": str(at / "ledger")}
            model = str(at / drafter)
            found = scenario.run(
                speculate, str(at), target, asynchronous, adapt, env=env | ledger, method=method, model=model
            )
            samples = [Sample.load(path) for path in sorted(at.glob("sample-*.safetensors"))]
            kept[key] = found, samples
        return kept[key]

    return run


MAIN = ("nearly", "eagle", "exact")


@changing
def test_each_runner_has_its_own_hooks(run) -> None:
    for runner, module in (
        ("V1", "vllm.v1.worker.cpu_model_runner"),
        ("V2", "vllm.v1.worker.cpu.model_runner"),
    ):
        found, _ = run(runner, *MAIN)
        assert found["runner"] == module
        first, second = found["calls"][:2], found["calls"][2:]
        assert all(first if runner == "V1" else second) and not any(second if runner == "V1" else first)


@changing
def test_every_step_verifies_as_many_drafts_as_were_chosen(run) -> None:
    (first, _), (second, _) = (run(runner, *MAIN) for runner in ("V1", "V2"))
    assert second["tokens"] == first["tokens"]
    assert second["steps"] == first["steps"]
    _check_numbers(second["steps"])
    assert second["learned"] == first["learned"] == ["1_1_2", "2_1_3", "3_1_4", "disable"]


def _check_numbers(steps: list[Any], lag: int = 1) -> None:
    """At the end of a request fewer drafts fit than were chosen, and after a prompt there is none."""
    seen = set()
    for (chosen, _), (_, verified) in zip(steps, steps[lag:]):
        assert all(number <= chosen for number in verified), steps
        seen |= {chosen} if chosen in verified else set()
    assert seen == {0, 1, 2, 3}, steps


@changing
def test_new_drafter_weights_arrive(run) -> None:
    found, _ = run("V2", *MAIN)
    exact, noise = found["lengths"]
    assert exact > 1.8 and noise < 1.4
    again = [tokens[:AGAIN] for tokens in found["tokens"]]
    assert found["again"] == [again] * 2, "the tokens depend on the drafter"


def _check_states(at: Path, found: dict[str, Any], samples: list[Sample], other: list[Sample]) -> None:
    assert found["counts"]["lost"] == found["counts"]["mismatched"] == 0
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts(), found["tokens"])]
    for text in texts:
        [one, *_], [same, *_] = (
            [s for s in kind if s.input_ids.tolist() == text] for kind in (samples, other)
        )
        assert torch.equal(one.known, same.known) and one.known[:-1].all()
        assert torch.equal(one.response, same.response)
        assert (one.hidden - same.hidden).abs().max() < CLOSE
        wanted, _ = states(at, text)
        assert (one.hidden - wanted)[one.known].abs().max() < CLOSE
        assert (one.auxiliary is None) == (same.auxiliary is None) == (at.name != "deep")
        if one.auxiliary is not None:
            assert (one.auxiliary - same.auxiliary).abs().max() < CLOSE


@pytest.mark.full
def test_a_number_that_never_changes(run, models) -> None:
    (one, first), (found, second) = run("V1", *MAIN), run("V2", *MAIN, adapt=False)
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner" and all(found["calls"][2:])
    assert found["tokens"] == one["tokens"] and max(max(lengths) for _, lengths in found["steps"]) == MOST
    assert found["again"] == [[tokens[:AGAIN] for tokens in found["tokens"]]] * 2
    _check_states(models / "nearly", found, second, first)


@changing
def test_captured_states_are_those_of_the_first_runner_and_of_a_forward(run, models) -> None:
    (_, first), (found, second) = (run(runner, *MAIN) for runner in ("V1", "V2"))
    _check_states(models / "nearly", found, second, first)


@changing
@pytest.mark.full
def test_scheduling_a_step_ahead(run, models) -> None:
    """The default on GPUs: the scheduler knows numbers of drafts only, and their tokens stay in the worker."""
    (_, first), (found, second) = run("V1", *MAIN), run("V2", *MAIN, asynchronous=True)
    assert found["asynchronous"]
    assert found["tokens"] == run("V1", *MAIN)[0]["tokens"]
    assert found["learned"] == ["1_1_2", "2_1_3", "3_1_4", "disable"]
    _check_numbers(found["steps"])
    _check_states(models / "nearly", found, second, first)


@changing
@pytest.mark.full
@pytest.mark.parametrize("case", [("target", "draft_model", "noisy"), ("deep", "eagle3", "eagle3")])
def test_other_drafters(run, models, case) -> None:
    (one, first), (found, second) = (run(runner, *case) for runner in ("V1", "V2"))
    assert found["tokens"] == one["tokens"] and found["steps"] == one["steps"]
    _check_numbers(found["steps"])
    _check_states(models / case[0], found, second, first)
