"""The pictures of the architecture page show the rooms, imports, patches and processes that there are."""

import importlib.util
import re

import pytest
from tree import TREE

from flashpatch import registry

PAGE = (TREE / "docs" / "explain" / "architecture.md").read_text()
ROOMS, WEIGHT, SYNC = re.findall(r"```mermaid\n(.*?)```", PAGE, re.S)
OWN_ROOMS = {"settings", "contracts", "arming", "ledger", "commands"}

_SPEC = importlib.util.spec_from_file_location("layers", TREE / "tests" / "patches" / "test_layers.py")
layers = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(layers)
IMPORTS = {name: layers.imports_of(path.read_text(), layers.MODULES) for name, path in layers.MODULES.items()}


def drawn(picture: str) -> set[tuple[str, str]]:
    """Return the arrows of a flowchart, by the ids of its boxes."""
    bare = re.sub(r"\[\"[^\"]*\"\]", "", re.sub(r'-- "[^"]*" -->', "-->", picture))
    return set(re.findall(r"^ *(\w+) --> (\w+)$", bare, re.M))


def room(module: str) -> str:
    _, *parts = module.split(".")
    if parts[:1] == ["verify"]:
        return "verify"
    if parts[:1] == ["patches"] and len(parts) > 1:
        return "_shared" if parts[1] == "_shared" else "FAMILY"
    return parts[0] if parts and parts[0] in OWN_ROOMS else "core"


def test_rooms_import_what_their_arrows_lead_to():
    imports = {(room(name), room(other)) for name, others in IMPORTS.items() for other in others}
    found = {(one, other) for one, other in imports if one != other and other != "core"}
    arrows = drawn(ROOMS)
    assert arrows <= found
    for one, other in found:
        reached, ahead = set(), {one}
        while ahead:
            reached |= ahead
            ahead = {end for start, end in arrows if start in reached} - reached
        assert other in reached, f"{one} imports {other}"


def test_the_way_of_a_weight_follows_imports():
    boxes = {id: path for id, path in re.findall(r'(\w+)\["([\w/]+)[:"]', WEIGHT)}
    modules = {f"flashpatch.patches.fp8.{path.replace('/', '.')}": id for id, path in boxes.items()}
    assert len(boxes) > 10 and modules.keys() <= IMPORTS.keys()
    found = {
        (id, modules[other]) for name, id in modules.items() for other in IMPORTS[name] if other in modules
    }
    assert drawn(WEIGHT) == found


@pytest.mark.parametrize(("who", "id"), re.findall(r"Note over ([\w-]+): ([\w.]+)", SYNC))
def test_a_patch_of_a_sync_acts_in_the_process_drawn(who, id):
    role = dict(re.findall(r"participant (\w+) as ([\w-]+)", SYNC)).get(who, who)
    assert role in registry.patches()[id].scope


def test_the_table_of_rooms_has_every_room():
    named = {name.strip("/") for name in re.findall(r"`(\w+/)`", PAGE)}
    assert named >= OWN_ROOMS
