"""The generated index says what the families say."""

from pathlib import Path

from flashpatch import _index, index, registry, write_index


def test_the_index_is_up_to_date() -> None:
    advice = "run: python -m flashpatch.write_index"
    assert {record.name: index.entry(record) for record in registry.built_in().values()} == _index.FAMILIES, (
        advice
    )
    assert Path(_index.__file__).read_text(encoding="utf-8") == write_index.text(
        registry.built_in().values()
    ), advice


def test_every_name_leads_to_its_family() -> None:
    for record in registry.built_in().values():
        for name in registry.family_names(record):
            assert index.family_of(name) == record.name
        assert index.family(record.name).modules >= {
            t.partition(":")[0] for p in record.patches for t in p.targets
        }
    assert index.family_of("nobody") is None


def test_it_has_the_patches_commands_of_all() -> None:
    records = registry.built_in().values()
    assert sorted(index.patch_ids()) == sorted(patch.id for record in records for patch in record.patches)
    assert index.owners("commands") == {name: record.name for record in records for name in record.commands}


def test_the_installed_package_has_it(installed) -> None:
    code = "import sys; from flashpatch import index; print(index.family_of('int8'), 'flashpatch.patches' in sys.modules)"
    assert installed.python(code) == "fp8 False"
