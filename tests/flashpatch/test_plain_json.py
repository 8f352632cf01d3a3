"""JSON without the package `json` is the same JSON."""

import json

import pytest

from flashpatch import plain_json

VALUES = [
    {"a": [1, 2.5, -0.0, 1e300, True, None, ("x",)], 'é"\\\n\ud800': {"nested": {}, "list": []}},
    {1: "key that is no text"},
    [float("inf"), float("nan")],
    {"kind": int, "set": {1}},
    "text",
    10**30,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("loaded", [True, False])
def test_it_is_what_json_writes(value, loaded, monkeypatch):
    if not loaded:
        monkeypatch.delitem(plain_json.sys.modules, "json")
    assert plain_json.dumps(value) == json.dumps(value, default=repr)
