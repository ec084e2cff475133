"""Reload: a good edit is taken over, a bad one changes nothing and is shown, a repaired one is taken at once."""
# ruff: noqa: ASYNC240 - these tests edit small files on the loop, as an operator would beside it

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.config.fleet_file import LoadedFleet, Problem, load_fleet
from router.config.reload import Reloader, ReloadResult

pytestmark = pytest.mark.real_time

SMALL = Path(__file__).resolve().parent.parent.joinpath("fixtures/fleets/small.yaml").read_text(encoding="utf-8")
HEAVIER = SMALL.replace("weight: 2", "weight: 5")
SECRET = "sk-do-not-print-me"
PATIENCE_S = 20.0


class Recorder:
    """What a gateway would be: holds the fleet that was applied last."""

    def __init__(self) -> None:
        self.applied: list[LoadedFleet] = []
        self.results: list[ReloadResult] = []
        self.fails_with: Exception | None = None

    def apply(self, loaded: LoadedFleet) -> None:
        if self.fails_with:
            raise self.fails_with
        self.applied.append(loaded)

    @property
    def weight(self) -> float:
        return self.applied[-1].specs[1].weight


@pytest.fixture
def fleet_file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture
def gateway() -> Recorder:
    return Recorder()


def reloader(path: Path, gateway: Recorder, **options: object) -> Reloader:
    return Reloader(path, gateway.apply, {"LLAMA_KEY": SECRET}, gateway.results.append,
                    **{"poll_s": 0.2, "settle_s": 0.02, **options})  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is awaited is a file system, which sets no event
            await asyncio.sleep(0.01)


@contextmanager
def without_permission(path: Path) -> Iterator[None]:
    path.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:  # whom modes do not bind
        os.seteuid(65_534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(0o600)


def replace_by_rename(path: Path, text: str | bytes) -> None:
    beside = path.with_name("fleet.yaml.tmp")
    beside.write_bytes(text.encode() if isinstance(text, str) else text)
    beside.replace(path)


def test_the_first_reload_applies_the_next_is_a_no_op(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        first = await subject.reload("start")
        assert (first.ok, first.changed, first.diff.added) == (True, True, ("llama-f16", "llama-q4"))
        fleet_file.write_text("# only a comment is new\n" + SMALL)
        second = await subject.reload("sighup")
        assert (second.ok, second.changed, bool(second.diff)) == (True, False, False)
        assert len(gateway.applied) == 1
        assert [result.trigger for result in gateway.results] == ["start", "sighup"]
    asyncio.run(scenario())


def test_the_diff_says_what_changes_field_by_field(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        await subject.reload("start")
        text = (HEAVIER.replace("port: 8080", "port: 9999").replace("ttft_s: 1.0", "ttft_s: 2.0")
                .replace("{name: batch}", "{name: batch, priority: -5, max_queue: 0}")
                .replace("{pool: edge}", "{pool: core, rack: r1}")
                .replace("http://127.0.0.1:9001", "http://127.0.0.1:9009\n    api_key_env: LLAMA_KEY"))
        text += """  - name: third
    url: http://127.0.0.1:9003
    engine: vllm
    model: smollm2-135m-instruct
    card: {type: l40s}
    price_per_hour: 1
"""
        fleet_file.write_text(text)
        result = await subject.reload("admin")
        assert result.ok
        assert (result.diff.added, result.diff.removed) == (("third",), ())
        first, second = result.diff.changed
        assert (first.name, first.is_replaced) == ("llama-f16", True)
        assert (second.name, second.is_replaced) == ("llama-q4", False)
        assert [(change.path, change.before, change.after) for change in second.settings] == [
            ("labels.pool", "edge", "core"), ("labels.rack", None, "r1"), ("weight", 2.0, 5.0)]
        assert [(change.path, change.before, change.after) for change in result.diff.settings] == [
            ("latency_classes[batch].max_queue", None, 0), ("latency_classes[batch].priority", 0, -5),
            ("latency_classes[interactive].ttft_s", 1.0, 2.0), ("listen.port", 8080, 9999)]
        assert result.diff.needs_restart == ("listen.port",)
        assert SECRET not in repr(result)
        fleet_file.write_text(SMALL.replace("    labels: {pool: edge}\n", ""))
        last = (await subject.reload("admin")).diff
        assert last.removed == ("third",)
        assert ("labels.pool", "core", None) in {
            (change.path, change.before, change.after) for change in last.changed[1].settings}
    asyncio.run(scenario())


def test_what_needs_a_restart_and_what_is_odd_stands_in_the_log_once(
    fleet_file: Path, gateway: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        await subject.reload("start")
        caplog.clear()
        text = SMALL.replace("port: 8080", "port: 9999").replace("    price_per_hour: 0.20\n", "")
        assert text.count("\n") == SMALL.count("\n") - 1
        fleet_file.write_text(text)
        assert (await subject.reload("admin")).changed
        assert (await subject.reload("admin")).ok
    asyncio.run(scenario())
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "no price_per_hour" in warnings[0]
    assert "a restart is needed for listen.port" in warnings[1]


def test_a_policy_is_compared_as_a_whole(fleet_file: Path, gateway: Recorder) -> None:
    policy = "policy: {prices: [request_cost, {name: drain_time, price_per_s: %s}]}\n"

    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        fleet_file.write_text(SMALL + policy % 0.001)
        await subject.reload("start")
        fleet_file.write_text(SMALL + policy % 0.002)
        (change,) = (await subject.reload("file")).diff.settings
        assert change.path == "policy.prices"
        assert [part.get("price_per_s") for part in change.after] == [None, 0.002]
        assert gateway.applied[-1].pipeline != gateway.applied[0].pipeline
    asyncio.run(scenario())


def test_p46_an_unrelated_edit_leaves_every_backends_identity_alone(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        await subject.reload("start")
        fleet_file.write_text(SMALL.replace("version: 1", "version: 1\nlimits: {max_in_flight: 99}"))
        result = await subject.reload("file")
        assert (result.changed, result.diff.changed) == (True, ())
        before, after = gateway.applied
        assert [spec.identity for spec in before.specs] == [spec.identity for spec in after.specs]
        assert before.specs == after.specs
    asyncio.run(scenario())


def test_p47_weight_0_reaches_the_gateway_without_replacing_the_backend(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        await subject.reload("start")
        fleet_file.write_text(SMALL.replace("weight: 2", "weight: 0"))
        result = await subject.reload("file")
        assert (result.ok, gateway.weight, result.diff.changed[0].is_replaced) == (True, 0.0, False)
    asyncio.run(scenario())


def test_p48_a_new_url_or_served_name_is_a_replacement_a_new_key_is_told(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        await subject.reload("start")
        fleet_file.write_text(SMALL.replace("http://127.0.0.1:9002/", "http://127.0.0.1:9012"))
        assert (await subject.reload("file")).diff.changed[0].is_replaced
        moved = "http://127.0.0.1:9012\n    api_key_env: LLAMA_KEY"
        fleet_file.write_text(SMALL.replace("http://127.0.0.1:9002/", moved))
        result = await subject.reload("file")
        (change,) = result.diff.changed
        assert (change.settings[0].path, change.settings[0].after, change.is_replaced) == (
            "api_key_env", "LLAMA_KEY", False)
        assert gateway.applied[-1].specs[1].api_key == SECRET
        assert SECRET not in repr(result) + repr(subject.status())
    asyncio.run(scenario())


def remove(path: Path) -> None:
    path.unlink()


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.yaml")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def content(text: str | bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text.encode() if isinstance(text, str) else text)


P44_INVALID: dict[str, Callable[[Path], object]] = {
    "syntax": content("version: 1\nbackends: [}\n"),
    "wrong type": content(SMALL.replace("weight: 2", "weight: heavy")),
    "duplicate key": content(SMALL.replace("    weight: 2", "    weight: 2\n    weight: 3")),
    "unknown key": content(SMALL.replace("weight: 2", "wieght: 2")),
    "truncated write": content(SMALL[: SMALL.index("{pool: edge}") + 6]),
    "empty file": content(""),
    "comments only": content("# nothing yet\n"),
    "not utf-8": content(SMALL.encode() + b"# \xff\n"),
    "BOM": content(b"\xef\xbb\xbf" + SMALL.encode()),
    "10 MB": content("#" * 10_000_000),
    "file removed": remove,
    "dangling symlink": dangle,
    "directory": directory,
    "key not set": content(SMALL.replace("    weight: 2", "    api_key_env: NOT_SET")),
    "unknown policy": content(SMALL + "policy: {name: nonesuch}\n"),
}


def make_valid_again(path: Path, text: str) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    replace_by_rename(path, text)


@pytest.mark.parametrize("kind", P44_INVALID)
def test_p44_an_invalid_file_changes_nothing_and_the_same_valid_one_is_taken_again(
    kind: str, fleet_file: Path, gateway: Recorder
) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        good = await subject.reload("start")
        P44_INVALID[kind](fleet_file)
        bad = await subject.reload("file")
        assert (bad.ok, bad.changed, bad.config_hash, bad.candidate_hash) == (False, False, good.config_hash, None)
        assert bad.problems
        assert len(gateway.applied) == 1
        status = subject.status()
        assert (status.is_stale, status.last_error, status.config_hash) == (True, bad, good.config_hash)
        assert (status.succeeded, status.failed) == (1, 1)

        make_valid_again(fleet_file, SMALL)
        same = await subject.reload("file")
        assert (same.ok, same.changed, same.config_hash) == (True, False, good.config_hash)
        assert not subject.status().is_stale
        assert subject.status().last_error == bad  # kept to be read
        make_valid_again(fleet_file, HEAVIER)
        assert (await subject.reload("file")).changed
        assert gateway.weight == 5
    asyncio.run(scenario())


def test_p44_permission_denied_and_given_back(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        await subject.reload("start")
        fleet_file.write_text(HEAVIER)
        with without_permission(fleet_file):
            bad = await subject.reload("file")
        assert "permission denied" in bad.problems[0].message
        assert (await subject.reload("file")).changed
    asyncio.run(scenario())


def test_p44_the_watch_takes_a_repaired_file(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        await subject.reload("start")
        watch = asyncio.create_task(subject.watch())
        for invalid in ("syntax", "file removed", "dangling symlink", "directory", "empty file"):
            failed = subject.status().failed
            P44_INVALID[invalid](fleet_file)
            await until(lambda failed=failed: subject.status().failed > failed)  # type: ignore[misc]
            assert len(gateway.applied) == 1
            make_valid_again(fleet_file, SMALL)
            await until(lambda: not subject.status().is_stale)
        replace_by_rename(fleet_file, HEAVIER)
        await until(lambda: len(gateway.applied) == 2)
        assert gateway.weight == 5
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    asyncio.run(scenario())


def watched_once(fleet_file: Path, gateway: Recorder, edit: Callable[[], object], **options: object) -> None:
    """Starts a watch on `fleet_file`, edits, and waits until the edit runs."""
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway, **options)
        await subject.reload("start")
        watch = asyncio.create_task(subject.watch())
        await asyncio.sleep(0.5)  # the watch is set up
        assert len(gateway.applied) == 1
        edit()
        await until(lambda: len(gateway.applied) == 2)
        assert gateway.weight == 5
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    asyncio.run(scenario())


def test_an_edit_in_place_is_noticed_by_events_alone(fleet_file: Path, gateway: Recorder) -> None:
    watched_once(fleet_file, gateway, lambda: fleet_file.write_text(HEAVIER), poll_s=3600)
    assert gateway.results[-1].trigger == "file"


def test_an_editors_rename_is_noticed_by_events_alone(fleet_file: Path, gateway: Recorder) -> None:
    watched_once(fleet_file, gateway, lambda: replace_by_rename(fleet_file, HEAVIER), poll_s=3600)
    assert gateway.results[-1].trigger == "file"


def test_a_kubernetes_configmap_swap_is_noticed_by_events_alone(tmp_path: Path, gateway: Recorder) -> None:
    """A ConfigMap volume: fleet.yaml → ..data/fleet.yaml, ..data → a dated folder; an update renames a new ..data."""
    for version, text in (("..2026_01", SMALL), ("..2026_02", HEAVIER)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "fleet.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..2026_01")
    (tmp_path / "fleet.yaml").symlink_to("..data/fleet.yaml")

    def swap() -> None:
        (tmp_path / "..data_tmp").symlink_to("..2026_02")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    watched_once(tmp_path / "fleet.yaml", gateway, swap, poll_s=3600)


def test_a_missed_event_is_repaired_by_comparing_content(
    fleet_file: Path, gateway: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_inotify(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("router.config.reload.awatch", no_inotify)
    watched_once(fleet_file, gateway, lambda: fleet_file.write_text(HEAVIER))
    assert gateway.results[-1].trigger == "poll"


def test_a_file_that_grows_slowly_is_not_taken_half_written(fleet_file: Path, gateway: Recorder) -> None:
    """Cut between two backends it is valid YAML with a backend less."""
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway, settle_s=0.4)
        await subject.reload("start")
        watch = asyncio.create_task(subject.watch())
        await asyncio.sleep(0.5)
        half = HEAVIER.index("  - name: llama-q4")
        with fleet_file.open("w") as file:
            file.write(HEAVIER[:half])
            file.flush()
            await asyncio.sleep(0.15)
            file.write(HEAVIER[half:])
        await until(lambda: len(gateway.applied) == 2)
        assert len(gateway.applied[-1].specs) == 2
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    asyncio.run(scenario())


def test_an_edit_made_before_the_watch_began_is_not_lost(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        running = load_fleet(fleet_file, {})
        fleet_file.write_text(HEAVIER)
        subject = reloader(fleet_file, gateway, running=running, poll_s=3600)
        watch = asyncio.create_task(subject.watch())
        await until(lambda: len(gateway.applied) == 1)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    asyncio.run(scenario())


def test_sighup_reloads(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        await subject.reload("start")
        uninstall = subject.install_sighup(asyncio.get_running_loop())
        fleet_file.write_text(HEAVIER)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: len(gateway.applied) == 2)
        assert gateway.results[-1].trigger == "sighup"
        uninstall()
    asyncio.run(scenario())


def test_triggers_are_serialised_and_share_a_waiting_reload(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        proofs: list[str] = []
        is_proving = 0

        async def prove(loaded: LoadedFleet) -> Sequence[Problem]:
            nonlocal is_proving
            is_proving += 1
            assert is_proving == 1
            proofs.append(loaded.config_hash)
            await asyncio.sleep(0.05)
            is_proving -= 1
            return ()

        subject = reloader(fleet_file, gateway, prove=prove)
        first = asyncio.create_task(subject.reload("start"))
        await until(lambda: is_proving == 1)
        fleet_file.write_text(HEAVIER)
        later = [asyncio.create_task(subject.reload(f"burst {number}")) for number in range(100)]
        later[0].cancel()  # who leaves does not take the reload of the others along
        results = await asyncio.gather(*later[1:])
        assert (await first).changed
        assert len({id(result) for result in results}) == 1
        assert len(proofs) == len(gateway.applied) == 2
        assert gateway.weight == 5
    asyncio.run(scenario())


def test_p45_a_fleet_that_fails_its_proof_is_refused(fleet_file: Path, gateway: Recorder) -> None:
    unreachable = Problem("fleet.yaml", 10, 1, "backends", "no backend can be reached")

    async def refuse(_: LoadedFleet) -> Sequence[Problem]:
        return [unreachable]

    async def crash(_: LoadedFleet) -> Sequence[Problem]:
        raise RuntimeError(f"401 for {SECRET}")

    async def scenario(prove: Callable[[LoadedFleet], Awaitable[Sequence[Problem]]]) -> ReloadResult:
        subject = reloader(fleet_file, gateway, prove=prove)
        result = await subject.reload("file")
        assert (result.ok, result.changed, gateway.applied) == (False, False, [])
        return result

    assert asyncio.run(scenario(refuse)).problems == (unreachable,)
    fleet_file.write_text(SMALL.replace("    weight: 2", "    api_key_env: LLAMA_KEY"))
    (crashed,) = asyncio.run(scenario(crash)).problems
    assert crashed.message == "could not be proven: RuntimeError: 401 for [secret]"


def test_p45_a_fleet_that_cannot_be_applied_leaves_the_old_one_running(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        good = await subject.reload("start")
        fleet_file.write_text(HEAVIER)
        gateway.fails_with = OSError("port 8080 is taken")
        bad = await subject.reload("file")
        assert (bad.ok, bad.changed, bad.config_hash) == (False, False, good.config_hash)
        assert "could not be applied: OSError: port 8080 is taken" in bad.problems[0].message
        assert subject.running is gateway.applied[0]
        gateway.fails_with = None
        assert (await subject.reload("admin")).changed  # the same file again, asked for by hand
    asyncio.run(scenario())


def test_p45_rollback_brings_the_earlier_fleet_back_and_the_watch_leaves_it(
    fleet_file: Path, gateway: Recorder
) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        assert not (await subject.rollback()).ok
        first = await subject.reload("start")
        assert not (await subject.rollback()).ok
        replace_by_rename(fleet_file, HEAVIER)
        second = await subject.reload("admin")
        watch = asyncio.create_task(subject.watch())
        back = await subject.rollback()
        assert (back.ok, back.changed, back.trigger, back.config_hash) == (True, True, "rollback", first.config_hash)
        assert back.diff.changed[0].settings[0].after == 2.0
        await asyncio.sleep(0.8)  # several polls: the file still holds the second fleet
        assert subject.status().config_hash == first.config_hash
        assert subject.status().previous_hash == second.config_hash
        replace_by_rename(fleet_file, HEAVIER.replace("weight: 5", "weight: 7"))
        await until(lambda: gateway.weight == 7)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    asyncio.run(scenario())


def test_a_dry_run_says_what_would_change_and_changes_nothing(fleet_file: Path, gateway: Recorder) -> None:
    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        first = await subject.reload("start")
        fleet_file.write_text(HEAVIER)
        result = await subject.dry_run()
        assert (result.ok, result.changed, result.is_dry_run) == (True, True, True)
        assert (result.config_hash, result.diff.changed[0].name) == (first.config_hash, "llama-q4")
        assert (len(gateway.applied), len(gateway.results), subject.status().succeeded) == (1, 1, 1)
        assert (await subject.reload("file")).changed
    asyncio.run(scenario())


def test_a_large_file_does_not_hold_the_loop(fleet_file: Path, gateway: Recorder) -> None:
    """While 600 backends are parsed, the loop still turns many times over."""
    head, one = SMALL.split("  - name: llama-f16")[0], SMALL[SMALL.index("  - name: llama-q4"):]
    fleet_file.write_text(head + "".join(
        one.replace("llama-q4", f"b{number}").replace("9002", str(10_000 + number)) for number in range(600)))

    async def scenario() -> None:
        subject = reloader(fleet_file, gateway)
        turns, loading = 0, asyncio.create_task(subject.reload("start"))
        while not loading.done():
            await asyncio.sleep(0)
            turns += 1
        assert loading.result().ok
        assert turns > 20
    asyncio.run(scenario())
