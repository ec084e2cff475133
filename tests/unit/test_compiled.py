"""The compiled form decides as the interpreted one does, and is never run in place of other sources than its own."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import compiled
from compiled import MANIFEST, SUFFIX, VARIABLE, CompiledError, hash_of, load, source_of
from compiled.build import missing_tools
from compiled.modules import MODULES
from tests import seeded_decisions

TELL = "import compiled; compiled.load(); from tests.seeded_decisions import main; main()"
ALSO = ("tests/unit/test_policies_beliefs.py", "tests/unit/test_policies_ccr.py",
        "tests/unit/test_policies_estimate.py", "tests/unit/test_ledger.py")
"""Tests that plant nothing in what is compiled: they hold there too."""
LIMIT_S = 240


def folder_of(path: Path, *, suffix: str = SUFFIX, source: str | None = None) -> Path:
    """A folder that claims to hold one compiled module."""
    path.mkdir(exist_ok=True)
    modules = {"policies.hopeless": source or hash_of("policies.hopeless")}
    (path / MANIFEST).write_text(json.dumps({"suffix": suffix, "shared": "headrace__mypyc", "modules": modules}))
    return path


def refused(folder: Path) -> str:
    with pytest.raises(CompiledError) as caught:
        load({VARIABLE: str(folder)})
    return str(caught.value)


def test_every_listed_module_is_a_source_and_listed_once() -> None:
    assert len(set(MODULES)) == len(MODULES)
    assert [module for module in MODULES if hash_of(module) is None] == []


def test_nothing_that_is_compiled_is_extended_by_what_is_not(root: Path) -> None:
    """An interpreted class cannot inherit from a compiled one, which shows at the first request that needs it."""
    listed = {node.name for module in MODULES for node in classes_in(source_of(module))}
    files = {source_of(module) for module in MODULES}
    others = [file for package in ("backends", "policies", "router", "loadtest", "headrace", "allocator")
              for file in (root / package).rglob("*.py") if file not in files]
    assert len(others) > 200
    assert [f"{file.stem}.{node.name}" for file in others for node in classes_in(file)
            if listed & {ast.unparse(base).rpartition(".")[2] for base in node.bases}] == []


def test_nothing_that_is_compiled_is_read_by_its_annotations(root: Path) -> None:
    """Annotations of compiled classes are without their arguments: what a decoder reads by them stays interpreted."""
    structs = [f"{module}.{node.name}" for module in MODULES for node in classes_in(source_of(module))
               if any("Struct" in ast.unparse(base) or "BaseModel" in ast.unparse(base) for base in node.bases)]
    assert structs == []
    variables = [f"{module}.{node.name}" for module in MODULES for node in classes_in(source_of(module))
                 if any("dataclass" in ast.unparse(each) for each in node.decorator_list)
                 and "ClassVar" in ast.unparse(node)]
    assert variables == []


def test_nothing_of_other_modules_is_copied_into_what_is_compiled(root: Path) -> None:
    """Only what is compiled has a hash: all else is looked up as it runs, but for `Final` constants."""
    final = [str(file) for package in ("backends", "policies", "router") for file in (root / package).rglob("*.py")
             if "Final" in {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}]
    assert final == []


def classes_in(file: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]


def test_without_the_variable_everything_is_interpreted() -> None:
    before = list(sys.meta_path)
    load({})
    load({VARIABLE: ""})
    assert sys.meta_path == before
    assert compiled.form() == "interpreted" or VARIABLE in os.environ


def test_a_folder_without_anything_compiled_is_refused(tmp_path: Path) -> None:
    assert "nothing is compiled there" in refused(tmp_path)
    (tmp_path / MANIFEST).write_text("{}")
    assert "nothing is compiled there" in refused(tmp_path)


def test_other_sources_are_refused_by_name(tmp_path: Path) -> None:
    said = refused(folder_of(tmp_path, source="0" * 64))
    assert "policies.hopeless has changed" in said
    assert "scripts/compile" in said


def test_another_interpreter_and_a_lost_file_are_refused(tmp_path: Path) -> None:
    assert "another interpreter" in refused(folder_of(tmp_path, suffix=".cpython-39-m68k.so"))
    assert f"hopeless{SUFFIX} is missing" in refused(folder_of(tmp_path))


def test_forms_do_not_mix(tmp_path: Path) -> None:
    """What has been imported from its source stays; compiled modules beside it would have classes of their own."""
    folder = folder_of(tmp_path)
    (folder / "policies").mkdir()
    for name in (f"policies/hopeless{SUFFIX}", f"headrace__mypyc{SUFFIX}"):
        (folder / name).touch()
    assert "policies.hopeless" in sys.modules
    assert "policies.hopeless was imported before" in refused(folder)


@pytest.mark.real_time
def test_a_process_that_cannot_have_it_ends_with_a_word(tmp_path: Path, root: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "headrace", "version"], cwd=root, capture_output=True, text=True,
                          timeout=60, env={**os.environ, VARIABLE: str(tmp_path)})
    assert done.returncode != 0
    assert "nothing is compiled there" in done.stderr
    assert done.stdout == ""


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.skipif(missing_tools() is not None, reason=f"cannot compile here: {missing_tools()}")
@pytest.mark.real_time
def test_compiled_and_interpreted_decide_alike_to_the_last_bit(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "compiled"
    # Without optimizing: half the time, and the arithmetic is the same.
    built = subprocess.run([sys.executable, "-m", "compiled.build", "--policies", "--optimize", "0", "--into", folder],
                           cwd=root, capture_output=True, text=True, timeout=LIMIT_S)
    assert built.returncode == 0, built.stdout + built.stderr
    environ = {**os.environ, VARIABLE: str(folder)}
    run = [sys.executable, "-c", TELL]
    made = subprocess.run(run, cwd=root, capture_output=True, text=True, timeout=LIMIT_S, env=environ, check=True)
    seeded_decisions.main()
    expected = capsys.readouterr().out.splitlines()
    assert len(expected) == seeded_decisions.DECISIONS * len(seeded_decisions.SIZES)
    assert made.stdout.splitlines() == expected
    others = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ALSO], cwd=root,
                            env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert others.returncode == 0, others.stdout
    asked = subprocess.run([sys.executable, "-m", "headrace", "version", "--json"], cwd=root, capture_output=True,
                           text=True, timeout=60, env=environ, check=True)
    assert json.loads(asked.stdout)["form"].startswith("compiled ")
