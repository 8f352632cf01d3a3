"""Install parts of a bundle into the Python that runs this: no network, no index, nothing but the standard library.

    python install.py PART.tar.xz...

A distribution that is there in another version stays, but for those of `REPLACED`."""

import sys
import sysconfig
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPLACED = ("vllm", "ray", "sglang", "sglang-kernel", "transformers", "tokenizers")
"""In more than one part, or what SGLang runs on alone."""
SITE = Path(sysconfig.get_path("purelib"))


def main(*parts: str) -> None:
    for part in parts:
        print(f"{part}: {install(Path(part))}", flush=True)


def install(part: Path) -> str:
    """Unpack a part, whose folders are distributions named NAME==VERSION; return what was done with each."""
    there: dict[str, str] = {}
    done: dict[str, str] = {}
    with tarfile.open(part) as archive:
        for member in archive:
            distribution, _, path = member.name.partition("/")
            name, _, wanted = distribution.partition("==")
            if distribution not in done:
                there[distribution] = "" if name in REPLACED else installed(name)
                other = there[distribution] not in ("", wanted)
                done[distribution] = f"{name} {wanted}" + (f" (stays {there[distribution]})" if other else "")
            if not there[distribution]:
                member.name = path
                archive.extract(member, SITE, filter="data")
    return ", ".join(done.values())


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
