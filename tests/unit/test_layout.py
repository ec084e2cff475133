"""The shape of the repository: names that are safe to import, rules that an import contract cannot say."""

import re
import stat
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("allocator", "backends", "compiled", "headrace", "loadtest", "policies", "router", "settings")
VAGUE = {"util", "utils", "helper", "helpers", "manager", "managers", "misc", "common", "base", "core"}
FRAGMENT = re.compile(r"\d+\.(feature|fix|change|removal|doc)(\.[a-z0-9-]+)?\.md")


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def test_every_package_is_there_and_has_modules() -> None:
    found = {module.relative_to(ROOT).parts[0] for module in modules()}
    assert found == set(PACKAGES)


def test_no_module_hides_one_of_the_standard_library() -> None:
    """Locust puts the locustfile's folder first on `sys.path`, and scripts do the same with theirs."""
    names = {module: module.stem if module.stem != "__init__" else module.parent.name for module in modules()}
    hiding = [str(module.relative_to(ROOT)) for module, name in names.items() if name in sys.stdlib_module_names]
    assert hiding == []


def test_no_module_beside_the_locustfile_hides_an_installed_one() -> None:
    beside = {module.stem for module in (ROOT / "loadtest").glob("*.py") if module.stem != "__init__"}
    beside |= {folder.name for folder in (ROOT / "loadtest").iterdir() if (folder / "__init__.py").exists()}
    assert "locustfile" in beside
    assert beside & {name for names in installed_top_levels().values() for name in names} == set()


def installed_top_levels() -> dict[str, set[str]]:
    """Top-level names by distribution, without Headrace itself."""
    return {
        distribution.name: {
            file.parts[0].removesuffix(".py") for file in distribution.files or ()
            if file.suffix == ".py" and not file.parts[0].startswith((".", "_"))
        }
        for distribution in distributions() if distribution.name != "headrace"
    }


def test_no_dependency_owns_our_top_level_names() -> None:
    """Our packages have plain names, as an application may; a dependency with one of them could be imported instead."""
    found = installed_top_levels()
    assert len(found) > 20, "the environment is not the one that development uses"
    assert {name: names & set(PACKAGES) for name, names in found.items() if names & set(PACKAGES)} == {}


def test_the_distribution_cannot_be_uploaded_by_mistake() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "Private :: Do Not Upload" in project["classifiers"]


def test_the_wheel_holds_all_our_packages() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert sorted(document["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == sorted(PACKAGES)
    assert sorted(document["tool"]["importlinter"]["root_packages"]) == sorted(PACKAGES)
    assert set(PACKAGES) <= set(document["tool"]["mypy"]["packages"])


def test_module_names_say_what_is_inside() -> None:
    vague = [str(module.relative_to(ROOT)) for module in modules()
             if {module.stem, *module.relative_to(ROOT).parent.parts} & VAGUE]
    assert vague == []


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without `__init__.py` is a namespace package: mypy, hatch and locust each see it differently."""
    folders = {module.parent for module in modules()}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_module_opens_with_what_it_is() -> None:
    silent = [str(module.relative_to(ROOT)) for module in modules()
              if (text := module.read_text("utf-8").strip()) and not text.startswith(('"""', 'r"""'))]
    assert silent == []


def test_modules_stay_small() -> None:
    """A file that nobody can hold in mind is two files. The bound is a stop, not an aim."""
    long = {str(module.relative_to(ROOT)): lines for module in modules()
            if (lines := len(module.read_text("utf-8").splitlines())) > 600}
    assert long == {}


def test_changelog_fragments_are_well_formed() -> None:
    folder = ROOT / "docs/changes.d"
    fragments = [file for file in folder.iterdir() if file.name != "README.md"]
    for file in fragments:
        assert FRAGMENT.fullmatch(file.name), f"{file.name}: see docs/changes.d/README.md"
        text = file.read_text("utf-8").strip()
        assert 20 <= len(text) <= 1000, f"{file.name}: one short paragraph"
        assert not text.startswith(("#", "-", "*")), f"{file.name}: no heading, no list"
        assert "\n\n" not in text, f"{file.name}: one paragraph"


SCRIPTS = [".ci/run", *sorted(f"scripts/{file.name}" for file in (ROOT / "scripts").iterdir())]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_and_stop_at_the_first_error(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & stat.S_IXUSR
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# "), "a script says what it is for"
    assert "set -euo pipefail" in text


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.M)
    assert set(phony.split()) == set(re.findall(r"^([a-z]+):.*## ", text, re.M))


def test_ci_runs_what_a_developer_runs() -> None:
    assert "exec make test" in (ROOT / ".ci/run").read_text()
    stages = (ROOT / "scripts/test").read_text()
    for part in ("ruff check", "mypy", "lint-imports", "python -m pytest", "headrace loadtest"):
        assert part in stages


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"


def test_nothing_in_the_product_reads_outside_the_checkout() -> None:
    """Tests may skip plainly where reference data is absent; the product must not know of it."""
    outside = [str(module.relative_to(ROOT)) for module in modules()
               if "../shared" in module.read_text("utf-8")]
    assert outside == []
