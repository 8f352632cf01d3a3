"""Tell which version of a framework is installed."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


def version_of(framework: str) -> Version:
    """Return the version of a framework or of its build for CPUs; 0 where neither is installed."""
    for name in (framework, f"{framework}-cpu"):
        try:
            return Version(version(name))
        except PackageNotFoundError:
            continue
    return Version("0")
