"""Every architecture that vLLM and transformers both have: the certificate of a tiny model of each is a verdict in words."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.full]


def test_every_architecture_has_a_verdict(tmp_path) -> None:
    """None ends its process, and none differs but those that are known to."""
    import exact_sweep

    rows = exact_sweep.swept(tmp_path)
    for name, row in rows.items():
        print(name, row["problem"] or row.get("first") or "agrees", f"{row.get('kl', 0):.1e}")
    assert len(rows) > 60
    assert not {name: row["died"] for name, row in rows.items() if "died" in row}
    differing = {name: row["first"] for name, row in rows.items() if not row["problem"] and row["first"]}
    assert differing.items() <= exact_sweep.DIFFERS.items()
