"""Reading a script gives the words that bash gives, and runs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import limit

from flashpatch.migration import arithmetic, shell

SHOW = "import json, sys; print(json.dumps(sys.argv[1:]))"

SAME_AS_BASH = {
    "plain": "show a b=1 c.d=2",
    "quotes": """show "a b" 'c $d' e"f"g 'it'"'"s""",
    "escapes": r"""show a\ b "c\"d" "e\$f" "g\h" 'i\j'""",
    "continued": "show a \\\n   b \\\n c",
    "a comment between": "show a  # b c\nshow d",
    "variables": 'A=1\nB="two words"\nshow $A ${A}x "$B" y$A.z',
    "split": 'ARGS="a=1 b=2  c=3"\nshow $ARGS end',
    "no split in an assignment": 'A="x y"\nB=$A\nshow "$B"',
    "defaults": 'B=\nshow ${A:-one} ${B:-two} ${B-three} ${C:-"four five"} "${D:=six}" ${1:-"-1"}',
    "a default with an expansion": 'H=/home/me\nshow ${DATA:-"${H}/data"} ${X:-${Y:-deep}}',
    "arithmetic": "a=3\nshow $((1024 * 2)) $((a+a*2)) $(( (a + 1) / 2 )) x=$((a%2)) $(($a - 10))",
    "arrays": 'A=(a=1 "b c" d)\nA+=(e)\nshow "${A[@]}" end',
    "an array over lines": 'A=(\n  a=1\n  b=2\n)\nshow "${A[@]}"',
    "redirections": "show a 2>&1 b > /dev/null 2>/dev/null c >&2 || true\nshow d",
    "pipes": "show a | cat; show b && show c",
    "here": "cat <<EOF > /dev/null\nshow no\nEOF\nshow yes",
    "lists in hydra's form": "show trainer.logger=['console','wandb'] \"x=['a','b']\" y=[1,2]",
    "exported": 'export A=1 B="2 3"\nshow "$A" "$B"',
    "appended": "A=a\nA+=b\nshow $A",
    "empty": "A=\nshow $A \"$A\" ''",
}


def ours(text: str) -> list[list[str]]:
    commands = shell.read(text).commands
    return [[word.text for word in found.words[1:]] for found in commands if found.words[0].text == "show"]


@pytest.mark.parametrize("text", SAME_AS_BASH.values(), ids=SAME_AS_BASH)
def test_words_are_those_of_bash(text: str, tmp_path: Path) -> None:
    head = f"show() {{ {sys.executable} -c '{SHOW}' \"$@\" >> {tmp_path}/words; }}\n"
    # without a default that a run has to tell, such as of a positional argument
    subprocess.run(["bash", "-c", head + text], env={"PATH": "/usr/bin:/bin"}, check=True, timeout=limit(60))
    bash = [json.loads(line) for line in (tmp_path / "words").read_text().splitlines()]
    assert ours(text) == bash != []


def test_what_only_a_run_could_tell_stays_as_it_is_written(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f'show $(touch {mark}) `touch {mark}` "$(touch {mark})" $1 $UNSET ${{UNSET}} ${{A%.sh}} $((1 + unset))'
    assert ours(text) == [
        [
            f"$(touch {mark})",
            f"`touch {mark}`",
            f"$(touch {mark})",
            "$1",
            "$UNSET",
            "${UNSET}",
            "${A%.sh}",
            "$((1 + unset))",
        ]
    ]
    assert all(shell.is_open(word) for word in ours(text)[0]) and not mark.exists()


def test_variables_have_their_last_value_and_line() -> None:
    found = shell.read("A=1\n\nexport B=two\nA=3 B=$A\nC=x show\n").variables
    assert {name: tuple(word) for name, word in found.items()} == {
        "A": ("3", 4),
        "B": ("3", 4),
        "C": ("x", 5),
    }


def test_variables_of_the_environment_are_known_and_not_the_scripts() -> None:
    found = shell.read("show $HOME/x", {"HOME": "/h"})
    assert found.commands[0].words[1].text == "/h/x" and not found.variables


def test_branches_are_noted_and_read() -> None:
    found = shell.read("if [ -n x ]; then\n  A=1\nelse\n  A=2\nfi\nfor i in 1 2; do show $i; done")
    assert found.branches and found.variables["A"].text == "2"
    assert not shell.read("A=1; show $A").branches


def test_fish_sets_variables() -> None:
    text = "set -x model some/model\nset steps 5\nset -euo pipefail\nset -x\nshow $model $steps"
    assert ours(text) == [["some/model", "5"]]


@given(st.text(alphabet="ab1 $(){}[]'\"`\\\n#;&|<>=:-+*/!@?EOF", max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    for command in shell.read(text).commands:
        assert command.words and all(1 <= word.line <= text.count("\n") + 1 for word in command.words)


@pytest.mark.parametrize(
    "text", ["2**99", "f(1)", "a.b", "1 if 2 else 3", "9" * 300, "1/0", "x", "1.5", "", "True"]
)
def test_other_arithmetic_is_left_alone(text: str) -> None:
    assert arithmetic.value(text, {"x": "y"}) is None
