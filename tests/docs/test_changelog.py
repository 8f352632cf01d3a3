"""The changelog keeps the form of Keep a Changelog, and names the version of the package first."""

import re

from tree import TREE

from flashpatch import __version__

TEXT = (TREE / "CHANGELOG.md").read_text()
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_the_first_version_is_the_packages_and_changes_stand_under_what_they_are():
    titles = re.findall(r"^## (.*)$", TEXT, re.M)
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - (unreleased|\d{{4}}-\d\d-\d\d)", titles[0])
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title) for title in titles[1:])
    kinds = re.findall(r"^### (.*)$", TEXT, re.M)
    assert kinds and set(kinds) <= set(KINDS)
    assert len(set(kinds)) == len(kinds)


def test_a_version_is_read_in_a_few_minutes():
    versions = re.split(r"^## ", TEXT, flags=re.M)[1:]
    assert versions and max(len(version.split()) for version in versions) <= 900
