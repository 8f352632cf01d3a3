"""The wrappers of fp8 and eagle, and what they call, are broken one at a time under vLLM's real engine; see `test_mutants`.

`inner_mutants` has what no wrapper shows from outside: a bucket lost or taken for another, a wrong version, states of
another position, a rollback of nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import inner_mutants
import mutant_runs
import pytest
import warm

pytestmark = [pytest.mark.vllm, pytest.mark.full]

IMPORTED = (*warm.VLLM, "inner_mutants")

#: family -> mutant -> why the probe cannot see it
SPARED: Mapping[str, Mapping[str, str]] = {
    "fp8": {},
    "eagle": {
        "inner drafter_half_loaded": "the drafters of the probe agree in the half that stays",
        "inner drafter_version_ahead": "the probe does not look at the number; drafts do not decide which tokens come",
    },
}


@pytest.mark.parametrize("family", SPARED)
def test_each_mutant_is_noticed(family: str, tmp_path: Path) -> None:
    more = inner_mutants.names(family)
    mutant_runs.check_each(family, tmp_path, SPARED[family], more=more, imported=IMPORTED)
