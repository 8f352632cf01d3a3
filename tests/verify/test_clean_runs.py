"""Clean runs of every kind give no alarm: ``--live``'s judgement of ledgers that are made from the records.

A run is a job's ledger: the rows of its processes. Two differ in what is on (one family or several), in the framework, in the
processes (roles of a process of its own or joined, one or two of each), in their order, in whether only what is due was called
or everything, and in whether the job was resumed, so that processes of an earlier try lie beside it.
"""

from collections.abc import Iterator
from itertools import chain, combinations

from live_rows import entry, row

from flashpatch import evidence, patches, registry
from flashpatch.ledger.runs import Row, Run
from flashpatch.verify import due
from flashpatch.verify.live import judge

PATCHES = registry.patches()

#: Roles of the processes of a job, by kind of job: an engine in one process, one of several, a job of verl on one node.
SHAPES = {
    "one process": (("driver", "engine-core", "worker"),),
    "core beside": (("driver",), ("engine-core", "worker")),
    "ranks beside": (("driver",), ("engine-core",), ("worker",), ("worker",)),
    "trainer": (("driver",), ("trainer",), ("trainer",), ("engine-core",), ("worker",)),
    "hybrid": (("driver",), ("trainer", "worker"), ("trainer", "worker"), ("engine-core",)),
}


def everything(
    families: tuple[str, ...], frameworks: set[str], shape: tuple[tuple[str, ...], ...]
) -> list[Row]:
    """Return the rows of a job in which each patch was called in each process whose role it has."""
    mine = [one for one in PATCHES.values() if one.family in families and one.framework in frameworks]
    rows = []
    for place, roles in enumerate(shape):
        states = {
            one.id: entry("live", 3) if not one.scope or one.scope & set(roles) else entry("installed")
            for one in mine
        }
        rows.append(row(*roles, pid=10 + place, ppid=10 if place else 1, patches=states, updates=2, steps=4))
    return rows


def least(rows: list[Row]) -> list[Row]:
    """Return the rows with the calls of patches that are due by themselves alone, and of those that this makes due."""
    called: set[tuple[int, str]] = set()
    while True:
        found = [
            Row(**{**vars(one), "patches": {
                id: state if (place, id) in called or state["state"] != "live" else entry("installed")
                for id, state in one.patches.items()
            }})
            for place, one in enumerate(rows)
        ]  # fmt: skip
        more = set()
        for place, at in enumerate(due.situations(found, PATCHES)):
            known = [PATCHES[id] for id in found[place].patches]
            for what in evidence.due(known, rows[place].roles, at.options, at.happened, at.facts):
                more |= {
                    (where, id)
                    for where, one in enumerate(rows)
                    if what.in_job or where == place
                    for id in what.alternatives
                    if one.patches[id]["state"] == "live"
                }
        if more <= called:
            return found
        called |= more


def resumed(rows: list[Row]) -> list[Row]:
    """Return the rows beside those of a try before, which was ended by force."""
    earlier = [
        Row(**{**vars(one), "pid": one.pid + 100, "ppid": one.ppid + 100, "start": "5"}) for one in rows
    ]
    return [*earlier, *rows]


def runs() -> Iterator[tuple[str, list[Row]]]:
    """Yield every run, with what tells it from the others."""
    several = (combinations(patches.ORDER, size) for size in (1, 2, 3, 6))
    for families in chain.from_iterable(several):
        for shape_name, shape in SHAPES.items():
            for engine in ("vllm", "sglang"):
                with_verl = any("trainer" in roles for roles in shape)
                frameworks = {engine} | ({"verl", f"verl_{engine}", "torch", "ray"} if with_verl else set())
                rows = everything(families, frameworks, shape)
                if not any(one.patches for one in rows):
                    continue
                for calls, found in (("all", rows), ("least", least(rows))):
                    name = f"{','.join(families)} {shape_name} {engine} {calls}"
                    yield name, found
                    yield f"{name} reversed", found[::-1]
                    yield f"{name} resumed", resumed(found)


def test_no_clean_run_gives_an_alarm() -> None:
    made, alarms = {}, {}
    for name, rows in runs():
        made[repr(rows)] = name
        problems = judge(Run("r", rows, []), PATCHES).problems
        if problems:
            alarms[name] = problems[0]
    assert not alarms
    assert len(made) > 1000
