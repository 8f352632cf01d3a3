"""Conditions of evidence: what they ask for, and how they are refused."""

import pytest

from flashpatch import conditions
from flashpatch.conditions import Facts

FACTS = Facts(
    options={"precision": "fp8", "flush": True, "kv": None, "arms": ["a", "b"]},
    called={"f.toy.one"},
    anywhere={"f.toy.one", "f.toy.two"},
    child={"worker"},
    uses={"toy"},
)


@pytest.mark.parametrize(
    ("text", "otherwise"),
    [
        ("precision=int8|fp8", "precision=int8"),
        ("precision!=int8", "precision!=fp8"),
        ("flush=true kv=none arms=b", "flush=true uses=other"),
        ("called=f.toy.one", "called=f.toy.two"),
        ("called!=f.toy.two", "called!=f.toy.one"),
        ("anywhere=f.toy.two|f.toy.three", "anywhere=f.toy.three"),
        ("child=worker uses=toy", "child=engine-core"),
    ],
)
def test_what_holds_and_what_does_not(text, otherwise):
    assert conditions.hold("", FACTS) and conditions.hold(text, FACTS)
    assert not conditions.hold(otherwise, FACTS)


@pytest.mark.parametrize("text", ["precision", "precision=", "=fp8", "a==b", "precision=fp8|", "a = b"])
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ValueError, match="is not of the form KEY=VALUE"):
        conditions.parse(text)


def test_in_words():
    said = conditions.words("precision=fp8|int8 called=f.toy.one")
    assert said == "precision is fp8 or int8 and f.toy.one was called"
    assert conditions.words("anywhere!=f.toy.two") == "f.toy.two was not called in this job"
    assert conditions.options("precision=fp8 called=f.toy.one kv!=none") == ("precision", "kv")
