"""Collect what becomes of a fork's settings, and check it against the options that there are."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from flashpatch import registry
from flashpatch.errors import PatchError
from flashpatch.migration import toml
from flashpatch.migration.given import Setting
from flashpatch.settings import options

Origin = Setting | str
"""What something stood for before: a setting of the user's, or a sentence's subject."""


class Plan:
    """Collect the outcome.

    Args:
        fork: whose settings they were.

    Attributes:
        names: names to switch on.
        tables: family to option to value.
        verl: settings to add to verl's command line, or to change there, with the reason.
        taken_out: overrides that go from the command line.
        otherwise: what is done in another way here: what it was, and how.
        lost: what could not be carried over: what it was, and why.
    """

    def __init__(self, fork: str) -> None:
        self.fork = fork
        self.names: list[str] = []
        self.tables: dict[str, dict[str, Any]] = {}
        self.verl: dict[str, tuple[str, str]] = {}
        self.taken_out: dict[str, Setting] = {}
        self.otherwise: list[tuple[str, str]] = []
        self.lost: list[tuple[str, str]] = []

    def enable(self, name: str) -> None:
        """Switch a name on."""
        registry.family_of(name)
        if name not in self.names:
            self.names.append(name)

    def option(self, family: str, name: str, value: Any, origin: Origin = "") -> None:
        """Set an option; one that does not take the value is lost, with the reason."""
        if isinstance(origin, Setting) and origin.is_open:
            self.lose(origin, f"only a run of the script could tell the value; set {name} in [{family}]")
            return
        try:
            self.tables.setdefault(family, {}).update(
                options.checked(registry.family(family), {name: value}, f"[{family}]")
            )
        except PatchError as error:
            self.lose(origin, f"{name} in [{family}] does not take {value!r} ({error.problem.rstrip('.')})")
        if not self.tables[family]:
            del self.tables[family]

    def number(self, setting: Setting, kind: type[int] | type[float]) -> Any:
        """Return a setting's value as a number; None, and the setting is lost, where it is none."""
        try:
            return kind(setting.value)
        except ValueError:
            self.lose(setting, f"{setting.value!r} is not a number of type {kind.__name__}")
            return None

    def set_verl(self, path: str, value: Any, reason: str = "") -> None:
        """Add an override to verl's command line, or change it there; ``path`` has its ``+`` if needed."""
        self.verl[path] = (_text(value), reason)

    def take_out(self, setting: Setting) -> None:
        """Take an override from the command line."""
        self.taken_out[setting.name] = setting

    def do_otherwise(self, origin: Origin, how: str) -> None:
        """Note what is done in another way here."""
        self.otherwise.append((str(origin), how))

    def lose(self, origin: Origin, why: str) -> None:
        """Note what could not be carried over."""
        self.lost.append((str(origin), why))

    def text(self, sources: str, remarks: list[str]) -> str:
        """Return the configuration as TOML, everything else in comments.

        Raises:
            PatchError: what was written is not what was planned; that is a fault of FlashPatch.
        """
        written = "\n".join(self._lines(sources, remarks)) + "\n"
        read = tomllib.loads(written)
        if read != {"enable": self.names, **self.tables}:
            raise PatchError(
                f"the configuration made from {self.fork} reads back as {read}.",
                advice="Report this as a bug.",
            )
        return written

    def _lines(self, sources: str, remarks: list[str]) -> Iterator[str]:
        yield from toml.comment(f"What {self.fork} was told in {sources}, for FlashPatch.")
        for remark in remarks:
            yield from toml.comment(remark)
        if not self.names:
            yield from toml.comment(
                "Nothing is switched on: leave FLASHPATCH unset, as FLASHPATCH=1 would take fp8."
            )
        yield ""
        yield from toml.document(self.names, self.tables)
        for title, lines in self.sections().items():
            if lines:
                yield from ("", f"# {title}:")
            for line in lines:
                yield from toml.comment(f"  {line}")

    def sections(self) -> dict[str, list[str]]:
        """Return what stands in comments: title to lines."""
        return {
            "Take out of verl's command": [str(setting) for setting in self.taken_out.values()],
            "Add to verl's command, or change there": [
                f"{path}={value}" + (f"    # {reason}" if reason else "")
                for path, (value, reason) in self.verl.items()
            ],
            "Done otherwise": [f"{what}: {how}" for what, how in self.otherwise],
            "Not carried over": [f"{what}: {why}" for what, why in self.lost],
        }


def is_on(setting: Setting | None, default: bool = False) -> bool:
    """Whether a setting is a yes, as Hydra and shells write it; ``default`` where there is none."""
    return default if setting is None else setting.value.strip().lower() in ("1", "true", "yes", "on")


def _text(value: Any) -> str:
    """Return a value as Hydra reads it."""
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_text(item) for item in value)}]"
    return str(value)
