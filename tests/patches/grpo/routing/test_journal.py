"""A response whose server dies goes on at the last token that the journal has."""

import json
from types import SimpleNamespace
from typing import Any

import grpo_lab
import pytest
import warm
from machine import limit
from tree import SUPPORT

from flashpatch.patches.grpo.routing.journal import RESUMED, Beginning, Journal

ROLLOUT = SimpleNamespace(prompt_length=8, response_length=10)


def asked(**more: Any) -> dict[str, Any]:
    return {"prompt_ids": [1, 2, 3], "sampling_params": {"temperature": 1.0, "logprobs": True, **more}}


class TestJournal:
    def test_tokens_follow_each_other_or_are_dropped(self) -> None:
        journal = Journal()
        journal.add("a", 0, [5, 6], [-0.1, -0.2], 1)
        journal.add("a", 2, [7], [-0.3], 2)
        journal.add("a", 2, [9], [-0.9], 2)  # again
        journal.add("b", 4, [1], None, 1)  # of a request that is not held
        assert journal.take("b") is None
        assert journal.take("a") == {
            "tokens": [5, 6, 7],
            "logprobs": [-0.1, -0.2, -0.3],
            "versions": [[1, 2], [2, 1]],
            "stop_reason": None,
        }
        assert journal.take("a") is None

    @pytest.mark.parametrize("end", [Journal.take, Journal.forget])
    def test_what_a_server_reports_too_late_is_dropped(self, end) -> None:
        journal = Journal()
        journal.add("a", 0, [5], None, 1)
        end(journal, "a")
        journal.add("a", 1, [6], None, 1)
        end(journal, "b")  # before anything of it came
        journal.add("b", 0, [5], None, 1)
        assert journal.size() == 0

    def test_the_oldest_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("flashpatch.patches.grpo.routing.journal.MOST", 2)
        journal = Journal()
        for name in "abc":
            journal.add(name, 0, [1], None, 1)
        assert journal.take("a") is None and journal.take("b") and journal.take("c")


class TestBeginning:
    @pytest.mark.parametrize(
        ("limit", "rest"), [({"max_tokens": 6}, 4), ({"max_new_tokens": 5}, 3), ({}, 8)], ids=str
    )
    def test_the_rest_is_asked_for_behind_what_is_there(self, limit: dict[str, int], rest: int) -> None:
        arguments = asked(**limit)
        beginning = Beginning(arguments, ROLLOUT)
        beginning.add({"tokens": [4, 5], "logprobs": [-0.4, -0.5], "versions": [[1, 2]], "stop_reason": None})
        wanted = beginning.rest()
        assert wanted["prompt_ids"] == [1, 2, 3, 4, 5] and not beginning.ended
        assert wanted["sampling_params"] == {"temperature": 1.0, "logprobs": True, "max_tokens": rest}
        assert arguments == asked(**limit), "the caller's own are left alone"

    def test_without_a_beginning_nothing_changes(self) -> None:
        beginning, output = Beginning(asked(), ROLLOUT), SimpleNamespace(token_ids=[1], extra_fields={})
        beginning.add(None)
        assert beginning.rest() == asked() and beginning.joined(output) is output and not output.extra_fields

    def test_an_answer_is_joined(self) -> None:
        beginning = Beginning(asked(), ROLLOUT)
        beginning.add({"tokens": [4], "logprobs": [-0.4], "versions": [[1, 1]], "stop_reason": None})
        output = beginning.joined(SimpleNamespace(token_ids=[5], log_probs=[-0.5], extra_fields={}))
        assert (output.token_ids, output.log_probs) == ([4, 5], [-0.4, -0.5])
        assert output.extra_fields == {RESUMED: [[1, 1]], "min_global_steps": 1}

    @pytest.mark.parametrize("limit", [{}, {"max_tokens": 2}], ids=["said so", "as many as asked for"])
    def test_a_complete_response_needs_no_server(self, limit: dict[str, int]) -> None:
        reason = None if limit else "completed"
        beginning = Beginning(asked(**limit), ROLLOUT)
        beginning.add(
            {"tokens": [4, 5], "logprobs": [-0.4, -0.5], "versions": [[3, 2]], "stop_reason": reason}
        )
        assert beginning.ended

    @pytest.mark.parametrize(
        "arguments",
        [
            asked(presence_penalty=0.5),
            asked(min_tokens=4),
            asked(stop=["END"]),
            asked(seed=1),
            {**asked(), "image_data": [object()]},
        ],
        ids=lambda arguments: str(sorted({*arguments, *arguments["sampling_params"]}))[-40:],
    )
    def test_what_depends_on_where_a_response_begins_is_not_resumed(self, arguments: dict[str, Any]) -> None:
        assert Beginning(asked(), ROLLOUT).resumable
        assert not Beginning(arguments, ROLLOUT).resumable

    def test_an_unknown_limit_is_not_guessed(self) -> None:
        assert not Beginning(asked(), None).resumable


def _run(tmp_path, options: dict[str, Any]) -> dict[str, Any]:
    done = warm.run(
        warm.VERL,
        [SUPPORT / "grpo_journal_servers.py", json.dumps(options)],
        env=grpo_lab.environment(tmp_path),
        cwd=tmp_path,
        timeout=limit(240),
    )
    assert done.returncode == 0, grpo_lab.tail(done)
    [line] = [line for line in done.stdout.splitlines() if line.startswith('{"tokens"')]
    return json.loads(line)


@pytest.mark.verl
def test_a_response_goes_on_where_its_server_died(tmp_path) -> None:
    import grpo_journal_servers as servers

    sequence = list(servers.PROMPT)
    for _ in range(servers.LENGTH):
        sequence.append(servers.following(sequence))
    wanted = sequence[len(servers.PROMPT) :]
    again, resumed = _run(tmp_path, {}), _run(tmp_path, {"journal": 4})
    for found in (again, resumed):
        assert found["tokens"] == wanted and found["logprobs"] == [-token / 100 for token in wanted]
        assert found["kept"] == 0 and RESUMED not in found["extra"]
    assert again["asked"] == [[len(servers.PROMPT), servers.LENGTH]]
    assert again["versions"] == [[7, servers.LENGTH]] and again["min"] == 7
    reported = servers.DIES_AFTER // 4 * 4
    assert resumed["asked"] == [[len(servers.PROMPT) + reported, servers.LENGTH - reported]]
    assert resumed["versions"] == [[6, reported], [7, servers.LENGTH - reported]] and resumed["min"] == 6
