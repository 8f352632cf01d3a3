"""Calls into the schedulers of a real SGLang engine: drafters by path, refusals, samples, embeddings."""

from pathlib import Path

import eagle_engines as eagles
import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.drafter_refit.commands import FLUSH, SAVE_EMBEDDINGS, UPDATE

pytestmark = pytest.mark.sglang(least="0.5.17")

lab = eagles.lab


def call(method: str, *given: str | int) -> list:
    return ["eagle", dict(method=method, given=list(given))]


@pytest.mark.full
@pytest.mark.parametrize("families", ["eagle", "bf16,eagle"])
def test_drafters_by_path_and_what_is_refused(families: str, models: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    target = eagles.target(models, 0.0)
    right = eagles.drafter(models, target, "right", exact=True)
    wrong = eagles.drafter(models, target, "wrong", exact=False)
    broken, odd = tmp_path / "broken.safetensors", tmp_path / "odd.safetensors"
    broken.write_bytes(b"1234")
    tensors = load_file(Path(right) / "model.safetensors")
    save_file({**tensors, "embed_tokens.weight": torch.zeros(4)}, odd)
    ask = ["tokens", dict(count=80)]
    overlapping = [
        ["begin", dict(selector="target")],
        call(UPDATE, right, 1),
        ["bucket", dict(source=target, selector="target")],
        ["end", {}],
    ]
    seen = lab.run(
        tmp_path,
        model=target,
        speculative_draft_model_path=right,
        steps=[
            call(FLUSH),
            ask,
            call(FLUSH),
            call(UPDATE, str(broken), 1),
            call(UPDATE, str(odd), 1),
            *([] if lab.OLD else overlapping),
            ask,
            call(FLUSH),  # a turn later SGLang's scheduler lists the answered requests no more
            call(UPDATE, wrong, 5),
            call(FLUSH),
            ask,
            call(FLUSH),
            call(UPDATE, right, 6),
            ask,
            call(FLUSH),
            call(SAVE_EMBEDDINGS, str(tmp_path / "saved")),
        ],
        flashpatch=families,
        options={"eagle": dict(adapt=False)},
        **eagles.SPECULATIVE,
    )
    assert seen.done, str(seen)
    first, before, second, unread, shared, *session, same, _, taken, during = seen.steps[:-6]
    worse, low, _, better, last, saved = seen.steps[-6:]
    assert first[0]["queue"] == second[0]["queue"] and second[0]["requests"] == len(before)
    assert second[0]["drafter"] == 0 and second[0]["drafter_path"] == right and second[0]["acceptance"] > 3
    assert "cannot be read" in unread and "embed_tokens.weight, which this drafter shares" in shared
    assert lab.OLD or 'an update session with selector="target" is open' in session[1]
    assert [answer["ids"] for answer in same] == [answer["ids"] for answer in before]
    assert taken == [{"version": 5, "tensors": len(tensors)}]
    assert (during[0]["drafter"], during[0]["drafter_path"]) == (5, wrong)
    for answers in (worse, better):
        assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in before]
    assert low[0]["acceptance"] < 1.5 and last[0]["acceptance"] > 3
    assert (last[0]["drafter"], last[0]["drafter_path"]) == (6, right)
    whole = load_file(tmp_path / "saved" / "model.safetensors")
    own = load_file(Path(target) / "model.safetensors")
    assert saved == [len(whole)] and all(torch.equal(tensor, own[name]) for name, tensor in whole.items())


def test_an_answer_without_ours_says_what_to_check() -> None:
    from flashpatch.patches.eagle.sglang import commands

    with pytest.raises(PatchError, match="do not know eagle_flush.*--live"):
        commands.answers({}, FLUSH)
    with pytest.raises(PatchError, match="rank 1: no"):
        commands.answers({commands.ANSWERS: [{"answer": 1}, {"error": "no"}]}, FLUSH)
