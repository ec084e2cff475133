"""The compiled form of the hot path: machine code made of the same sources, put in their place where it is asked for.

`python -m compiled.build` (or `scripts/compile`) makes extension modules of `modules.MODULES` with mypyc, in a folder
of their own. Nothing looks there unless `HEADRACE_COMPILED` names the folder; then `load`, which the packages that
start processes call before they import anything, has these modules come from it and all others from their sources as
ever. Without the variable every module is interpreted, and that is the reference: the compiled form must do the same.

No old code runs unseen. The folder's manifest has the hash of each source that went into it; where one differs from
what is there now, the process ends with a word about it. It never goes on with a part of them, since compiled modules
know each other's insides.
"""

import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

VARIABLE = "HEADRACE_COMPILED"
MANIFEST = "manifest.json"
SOURCES = Path(__file__).resolve().parent.parent
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
"""Ends an extension module's file name: names the interpreter and the machine that it was made for."""

_loaded: list["Manifest"] = []
"""What this process runs compiled; at most one."""


class CompiledError(ImportError):
    """The compiled form was asked for and cannot be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder of extension modules was made of."""

    suffix: str
    """See `SUFFIX`."""
    modules: Mapping[str, str]
    """SHA-256 of each source, by module."""
    shared: str
    """The extension module with the code of all; the others are doors to it."""

    @property
    def digest(self) -> str:
        """Eight characters that name these sources."""
        return sha256(json.dumps(sorted(self.modules.items())).encode()).hexdigest()[:8]

    @property
    def form(self) -> str:
        """How processes that run it call themselves."""
        return f"compiled {self.digest}"

    def files(self, folder: Path) -> dict[str, Path]:
        """The extension modules by name."""
        return {name: (folder / name.replace(".", "/")).with_suffix(self.suffix)
                for name in (*self.modules, self.shared)}


class _Finder(MetaPathFinder):
    """Finds compiled modules, before anybody looks for their sources."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        if file is None:
            return None
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, str(file)))


def load(environ: Mapping[str, str] = os.environ) -> None:
    """Have the listed modules come from the folder that the environment names, if it names one. Once a process.

    Raises:
        CompiledError: there is nothing there, it was made of other sources or for another interpreter, or one of the
            modules has been imported already.
    """
    named = environ.get(VARIABLE)
    if not named or _loaded:
        return
    folder = Path(named)
    manifest = usable(folder)
    files = manifest.files(folder)
    if early := sorted(files.keys() & sys.modules.keys()):
        raise CompiledError(f"{VARIABLE}={folder}: {early[0]} was imported before the compiled form was asked for.")
    sys.meta_path.insert(0, _Finder(files))
    _loaded.append(manifest)


def form() -> str:
    """How this process runs the listed modules: `interpreted`, or `compiled` with the digest of their sources."""
    return _loaded[0].form if _loaded else "interpreted"


def usable(folder: Path) -> Manifest:
    """The manifest of a folder that `load` takes.

    Raises:
        CompiledError: there is nothing there, or it was made of other sources or for another interpreter.
    """
    manifest = read_manifest(folder)
    if problem := _unusable(manifest, folder):
        raise CompiledError(f"{VARIABLE}={folder}: {problem}. Run scripts/compile, or unset {VARIABLE}.")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        CompiledError: it has none that can be read.
    """
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        return Manifest(document["suffix"], document["modules"], document["shared"])
    except (OSError, ValueError, KeyError, TypeError):
        raise CompiledError(f"{VARIABLE}={folder}: nothing is compiled there. Run scripts/compile, or unset {VARIABLE}."
                            ) from None


def source_of(module: str) -> Path:
    """The file that a module is written in."""
    return SOURCES / (module.replace(".", "/") + ".py")


def hash_of(module: str) -> str | None:
    """SHA-256 of a module's source; `None` where there is none."""
    try:
        return sha256(source_of(module).read_bytes()).hexdigest()
    except OSError:
        return None


def _unusable(manifest: Manifest, folder: Path) -> str | None:
    """What speaks against using it."""
    if manifest.suffix != SUFFIX:
        return f"made for another interpreter (*{manifest.suffix}, this one takes *{SUFFIX})"
    changed = [module for module, known in manifest.modules.items() if hash_of(module) != known]
    if changed:
        return f"made of other sources: {changed[0]} has changed since" + (
            f", and {len(changed) - 1} more" if len(changed) > 1 else "")
    missing = [file for file in manifest.files(folder).values() if not file.is_file()]
    return f"{missing[0].name} is missing" if missing else None
