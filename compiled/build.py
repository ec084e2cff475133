"""`python -m compiled.build`: makes the compiled form. Needs a C compiler and the `compile` extra.

The folder is made anew beside the old one and takes its place at the end, so that a build that fails leaves what was
there, and a process that starts meanwhile sees the one or the other.
"""

import argparse
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from compiled import MANIFEST, SOURCES, SUFFIX, VARIABLE, Manifest, hash_of, source_of
from compiled.modules import MODULES, POLICIES

GROUP = "headrace"
SHARED = f"{GROUP}__mypyc"


class BuildError(Exception):
    """Nothing was made; the text says why."""


def build(folder: Path, modules: Sequence[str] = MODULES, *, optimize: str = "3") -> Manifest:
    """Compile `modules` into `folder`, in place of what is there.

    Raises:
        BuildError: mypyc or the C compiler refuses, or a source changed meanwhile.
        ImportError: see `missing_tools`.
    """
    before = _hashes(modules)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=folder.parent) as scratch:
        made, work = Path(scratch) / "made", Path(scratch) / "work"
        _compile([str(source_of(module).relative_to(SOURCES)) for module in modules], made, work, optimize)
        if _hashes(modules) != before:
            raise BuildError("a source changed while it was compiled; run this again")
        manifest = Manifest(SUFFIX, before, SHARED)
        document = {"suffix": manifest.suffix, "shared": manifest.shared, "modules": dict(manifest.modules)}
        (made / MANIFEST).write_text(json.dumps(document, indent=1))
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        made.rename(folder)
    return manifest


def missing_tools() -> str | None:
    """What the machine lacks for a build, and where to get it; `None` where it has all."""
    if shutil.which(os.environ.get("CC", "cc")) is None:
        return "there is no C compiler. Debian: apt-get install gcc"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"Python's headers are missing. Debian: apt-get install python{version}-dev"
    if find_spec("mypyc") is None or find_spec("setuptools") is None:
        return "mypyc or setuptools is missing: pip install 'headrace[compile]'"
    return None


def _hashes(modules: Sequence[str]) -> dict[str, str]:
    found = {}
    for module in modules:
        digest = hash_of(module)
        if digest is None:
            raise BuildError(f"there is no {source_of(module)}")
        found[module] = digest
    return found


def _compile(sources: Sequence[str], made: Path, work: Path, optimize: str) -> None:
    """Sources relative to the folder of all sources, extension modules into `made`."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.errors import CompileError, LinkError

    here = Path.cwd()
    os.chdir(SOURCES)   # mypyc names modules by their path from here
    try:
        # A cache of its own: mypy's would be made anew with each change of hands.
        options = ["--python-version", f"{sys.version_info.major}.{sys.version_info.minor}", "--strict",
                   "--ignore-missing-imports", "--cache-dir", str(work / "cache"), "--config-file", ""]
        extensions = mypycify([*options, *sources], opt_level=optimize, debug_level="0", group_name=GROUP,
                              target_dir=str(work / "c"))
        command = Distribution({"name": GROUP, "ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(made), str(work / "objects")
        command.ensure_finalized()
        command.run()
    except SystemExit:
        raise BuildError("mypyc refuses; what it says stands above") from None
    except (CompileError, LinkError) as error:
        raise BuildError(f"the C compiler failed: {error}") from None
    finally:
        os.chdir(here)


def main(given: Sequence[str] | None = None) -> int:
    """Builds, and says how to use what was made. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Compile the hot path.")
    parser.add_argument("--into", type=Path, default=SOURCES / ".compiled", help="the folder (default: .compiled)")
    parser.add_argument("--policies", action="store_true", help="only what a decision runs")
    parser.add_argument("--optimize", default="3", choices=("0", "1", "2", "3"), help="the compiler's -O (default: 3)")
    options = parser.parse_args(given)
    modules = POLICIES if options.policies else MODULES
    try:
        if lacking := missing_tools():
            raise BuildError(lacking)
        manifest = build(options.into, modules, optimize=options.optimize)
    except BuildError as error:
        print(f"compile: error: {error}", file=sys.stderr)
        return 1
    print(f"compile: {len(modules)} modules as {manifest.digest} in {options.into}")
    print(f"compile: run with {VARIABLE}={options.into.absolute()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
