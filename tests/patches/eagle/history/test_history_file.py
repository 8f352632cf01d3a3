"""Answers that outlive their engine."""

import gc
import os
import stat

import numpy
import pytest

pytest.importorskip("torch")

from flashpatch.patches.eagle.history.engine_history import EngineHistory
from flashpatch.patches.eagle.history.history_file import HistoryFile


class Request:
    """Stands for an engine's."""


def answer(history, prompt, tokens):
    request = Request()
    history.take_tokens(request, prompt, [*prompt, *tokens])
    del request
    gc.collect()


def test_an_engine_that_takes_anothers_place_drafts_what_it_had_answered(tmp_path):
    """As in the second epoch of 400 prompts of 8 answers, of which a job was killed."""
    noise = numpy.random.default_rng(0)
    first = EngineHistory(1 << 20, HistoryFile(str(tmp_path / "kept"), 1000))
    asked = [noise.integers(0, 1000, 12).tolist() for _ in range(400)]
    answers = [noise.integers(0, 1000, 50).tolist() for _ in asked]
    for prompt, tokens in zip(asked, answers, strict=True):
        answer(first, prompt, tokens)
    running = Request()
    first.take_tokens(running, [1, 2], [1, 2, 3])
    [file] = (tmp_path / "kept").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with file.open("ab") as torn:
        torn.write(numpy.array([2, 9, 1, 2, 3], "<i4").tobytes() + b"x")
    second = EngineHistory(1 << 20, HistoryFile(str(tmp_path / "kept"), 1000))
    right = 0
    for prompt, tokens in zip(asked, answers, strict=True):
        text = second.drafts.begin(prompt)
        second.drafts.extend(text, tokens[:2])
        right += [guess.token for guess in text.index.predict(text.tokens, 8)] == tokens[2:10]
    assert right == 400
    answer(second, [5, 6], [7])
    assert HistoryFile(str(tmp_path / "kept"), 1000).load(1 << 20)[-1] == ([5, 6], [7]), (
        "behind what was torn"
    )


def test_the_newest_stay_and_another_model_or_replica_has_its_own(tmp_path, monkeypatch):
    file = HistoryFile(str(tmp_path), 10)
    assert file.load(100) == []
    for number in range(9):
        file.append(1, [number, number])
    file.append(2, [1, 2])  # nothing was answered
    kept = [([number], [number]) for number in (6, 7, 8)]
    assert HistoryFile(str(tmp_path), 10).load(12) == kept == HistoryFile(str(tmp_path), 10).load(100)
    assert HistoryFile(str(tmp_path), 11).load(100) == [] == HistoryFile(str(tmp_path), 10, rank=1).load(100)
    monkeypatch.setenv("VERL_REPLICA_RANK", "3")
    assert HistoryFile(str(tmp_path), 10).load(100) == []


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/dev/full"), reason="nothing is ever full")
def test_a_folder_that_cannot_be_written_is_said_and_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").touch()
    history = EngineHistory(100, HistoryFile(str(tmp_path / "file" / "folder"), 10))
    answer(history, [1], [2])
    assert caplog.text.count("answers are not kept") == 1
    full = HistoryFile(str(tmp_path), 10)
    full.path.symlink_to("/dev/full")
    full.append(1, [1, 2])
    full.append(1, [1, 2])
    assert caplog.text.count("No space left") == 1
