"""Answers that outlive their engine."""

import gc
import stat

import numpy
import pytest

from flashpatch.patches.eagle.history.engine_history import EngineHistory
from flashpatch.patches.eagle.history.history_file import HistoryFile


class Request:
    """Stands for an engine's."""


def answer(history, prompt, tokens):
    request = Request()
    history.take_tokens(request, prompt, [*prompt, *tokens])
    del request
    gc.collect()


def opened(folder, capacity=1 << 20, vocabulary=1000, **more):
    return HistoryFile(str(folder), capacity, vocabulary, **more)


def test_an_engine_that_takes_anothers_place_drafts_what_it_had_answered(tmp_path):
    """As in the second epoch of 400 prompts of 8 answers, of which a job was killed; two engines wrote, and the disk was full."""
    noise = numpy.random.default_rng(0)
    first = EngineHistory(1 << 20, opened(tmp_path / "kept"))
    asked = [noise.integers(0, 1000, 12).tolist() for _ in range(400)]
    answers = [noise.integers(0, 1000, 50).tolist() for _ in asked]
    for place, (prompt, tokens) in enumerate(zip(asked, answers, strict=True)):
        answer(first, prompt, tokens)
        [file] = (tmp_path / "kept").iterdir()
        if place % 100 == 7:
            with file.open("ab") as torn:
                torn.write(b"\n[2,[1,2,3")
    running = Request()
    first.take_tokens(running, [1, 2], [1, 2, 3])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    second, right = EngineHistory(1 << 20, opened(tmp_path / "kept")), 0
    for prompt, tokens in zip(asked, answers, strict=True):
        text = second.drafts.begin(prompt)
        second.drafts.extend(text, tokens[:2])
        right += [guess.token for guess in text.index.predict(text.tokens, 8)] == tokens[2:10]
    assert right == 400


def test_the_newest_stay_and_another_model_or_replica_has_its_own(tmp_path, monkeypatch):
    file = opened(tmp_path, 100)
    for number in range(900):
        file.append(1, [number, number])
    file.append(2, [1, 2])  # nothing was answered
    kept = opened(tmp_path, 100).load()
    assert kept == [([number], [number]) for number in range(850, 900)]
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) < 3 * 12 * 100
    assert opened(tmp_path, vocabulary=999).load() == [] == opened(tmp_path, rank=1).load()
    monkeypatch.setenv("VERL_REPLICA_RANK", "3")
    assert opened(tmp_path).load() == []


@pytest.mark.parametrize(
    "text",
    [
        b"[1,[5,1000]]",
        b"[1,[5,-1]]",
        b"[1,[]]",
        b"{}",
        b"[1,[1,true]]",
        b"[1,[1,2.0]]",
        b"[9,[1,2]]",
        b"[" * 9999,
        bytes(999),
    ],
)
def test_what_is_no_answer_of_this_model_is_passed_over(tmp_path, text):
    file = opened(tmp_path)
    file.append(1, [5, 6])
    file.path.write_bytes(file.path.read_bytes() + text)
    file.append(1, [7, 8])
    assert file.load() == [([5], [6]), ([7], [8])]


def test_what_others_may_write_to_is_neither_read_nor_written_and_that_is_said_once(tmp_path, caplog):
    file = opened(tmp_path / "kept")
    file.load()
    file.path.symlink_to(tmp_path / "victim")
    file.append(1, [1, 2])
    assert not (tmp_path / "victim").exists() and "are not kept in" in caplog.text
    file.path.unlink()
    file.append(1, [1, 2])
    file.folder = str(tmp_path / "kept")
    (tmp_path / "kept").chmod(0o777)
    caplog.clear()
    assert file.load() == [] and file.append(1, [3, 4]) is None
    assert caplog.text.count("is not a private directory") == 1
    (tmp_path / "kept").chmod(0o700)
    assert file.load() == [([1], [2])]
