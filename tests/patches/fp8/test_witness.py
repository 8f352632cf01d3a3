"""What an engine's own checksums say, compared within one version of the policy."""

import pytest

from flashpatch import ledger
from flashpatch.patches.fp8.witness import Witness


@pytest.mark.parametrize("then", [{"a": "1", "b": "9"}, {"a": "1"}], ids=["changed", "gone"])
def test_what_changed_under_a_version_stays_in_the_row(then, monkeypatch) -> None:
    noted = {}
    monkeypatch.setattr(ledger, "note", lambda **notes: noted.update(notes))
    monkeypatch.setattr(ledger, "flush", lambda: None)
    first, witness = {"a": "1", "b": "2"}, Witness()
    witness.heard(1, "fp8.some", [first])
    assert "witness_differs" not in noted
    witness.heard(1, "fp8.some", [then])
    assert noted["witness_differs"].endswith("policy version 1: b")
    witness.heard(1, "fp8.some", [first])
    witness.heard(2, "fp8.some", [then])
    assert noted["witness_differs"].endswith("policy version 1: b") and noted["witness"] == 2
