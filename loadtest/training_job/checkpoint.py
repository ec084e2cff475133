"""Checkpoints: all of a training's state in one file that is there whole or not at all.

The file is a NumPy archive: parameters, both moments of the optimizer, the step, the seed, and the generator's state as
JSON. It is written beside its place, flushed to the disk and renamed, so that a kill at any moment leaves the old one.
"""

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np

from loadtest.training_job.network import SHAPES, TrainingState

PARTS = ("parameters", "first_moments", "second_moments")


class BadCheckpoint(ValueError):
    """The file is no checkpoint of this job; the text says what is wrong with it."""


def save(state: TrainingState, path: Path) -> None:
    """Replaces the checkpoint. Raises OSError, and leaves the old one in place."""
    arrays = {f"{part}.{name}": array for part in PARTS for name, array in getattr(state, part).items()}
    about = {"seed": state.seed, "step": state.step, "rng": state.rng.bit_generator.state}
    archive = io.BytesIO()
    np.savez(archive, about=np.array(json.dumps(about)), **arrays)
    replace_file(path, archive.getvalue())


def load(path: Path) -> TrainingState:
    """The training as it was saved. Raises BadCheckpoint; FileNotFoundError where there is none."""
    content = io.BytesIO(path.read_bytes())
    try:
        with np.load(content, allow_pickle=False) as archive:
            about = json.loads(str(archive["about"]))
            parts = {part: {name: archive[f"{part}.{name}"] for name in SHAPES} for part in PARTS}
        rng = np.random.Generator(np.random.PCG64())
        rng.bit_generator.state = about["rng"]
        state = TrainingState(seed=about["seed"], step=about["step"], rng=rng, **parts)
    except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise BadCheckpoint(f"{path} is no checkpoint of this job: {error}") from error
    wrong = [name for part in parts.values() for name, shape in SHAPES.items() if part[name].shape != shape]
    if wrong:
        raise BadCheckpoint(f"{path} holds another network: {wrong[0]} has another shape than {SHAPES[wrong[0]]}")
    return state


def digest(state: TrainingState) -> str:
    """A short name for the exact state: equal if and only if all later steps are."""
    content = hashlib.sha256(json.dumps([state.step, state.rng.bit_generator.state], default=int).encode())
    for part in PARTS:
        for name in SHAPES:
            content.update(getattr(state, part)[name].tobytes())
    return content.hexdigest()[:16]


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file whole and durably. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
