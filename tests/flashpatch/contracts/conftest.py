"""Throw-away framework sources."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from flashpatch.contracts.contract import ContractResult, check
from flashpatch.contracts.source import Sources
from flashpatch.record import Contract, Patch


def patch(*targets: str, **contract) -> Patch:
    words = dict(why="", how="", remove_when="", wrapper=print, contract=Contract(**contract))
    return Patch(id="test.toy.patch", targets=targets, requires="toy", **words)


@pytest.fixture
def toy_patch() -> Callable[..., Patch]:
    return patch


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write modules of a package: ``write(toy={"__init__": "...", "engine.core": "..."})``."""

    def write(**packages: dict[str, str]) -> Path:
        for package, modules in packages.items():
            for name, text in {"__init__": "", **modules}.items():
                path = tmp_path.joinpath(package, *name.split(".")).with_suffix(".py")
                path.parent.mkdir(parents=True, exist_ok=True)
                (path.parent / "__init__.py").touch()
                path.write_text(dedent(text).lstrip("\n"))
        return tmp_path

    return write


@pytest.fixture
def checked(tmp_path: Path) -> Callable[..., ContractResult]:
    """``checked(*targets, **contract)`` against what was written; other packages have no source."""

    def checked(*targets: str, version: str | None = None, **contract) -> ContractResult:
        def root_for(package: str) -> Path | None:
            root = tmp_path / package
            return root if root.is_dir() else None

        return check(patch(*targets, **contract), Sources(root_for), version)

    return checked
