"""The targets of `headrace bench gateway`: their configuration texts, and how their programs are found."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from loadtest.bench.run import BenchOptions, UnknownTarget
from loadtest.bench.starting import ASIDE, find, version_in
from loadtest.bench.targets import TARGETS
from loadtest.bench.targets.headrace_gateway import KEY_VARIABLE
from loadtest.bench.targets.target import Launch, Site, Target
from router.config.fleet_file import load_fleet

ENGINE_PORTS = tuple(range(40001, 40009))


def launched(name: str, folder: Path) -> Launch:
    launch = TARGETS[name].launch(Site(str(folder), 41000, 41001, ENGINE_PORTS, "sk-bench"))
    for file, text in launch.files.items():
        (folder / file).write_text(text)
    return launch


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_listens_where_it_is_told_and_knows_all_engines(name: str, tmp_path: Path) -> None:
    launch = launched(name, tmp_path)
    said = " ".join([*launch.command, *launch.files.values()])
    assert "41000" in said
    assert all(str(port) in said for port in ENGINE_PORTS)
    assert "0.0.0.0" not in said


def program(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([os.environ["PATH"], *ASIDE]))
    return found or pytest.skip(f"{name} is not installed")


def test_nginx_streams_and_keeps_connections(tmp_path: Path) -> None:
    text = launched("nginx", tmp_path).files["nginx.conf"]
    for line in ("proxy_buffering off;", "proxy_http_version 1.1;", 'proxy_set_header Connection "";',
                 "keepalive 2048;"):
        assert line in text


def test_nginx_accepts_its_file(tmp_path: Path) -> None:
    launch = launched("nginx", tmp_path)
    done = subprocess.run([program("nginx"), "-t", *launch.command], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_haproxy_does_not_wait_for_more(tmp_path: Path) -> None:
    text = launched("haproxy", tmp_path).files["haproxy.cfg"]
    assert "option http-no-delay" in text
    assert "nbthread 1" in text


def test_haproxy_accepts_its_file(tmp_path: Path) -> None:
    launched("haproxy", tmp_path)
    done = subprocess.run([program("haproxy"), "-c", "-f", str(tmp_path / "haproxy.cfg")], capture_output=True,
                          text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_envoy_has_one_worker_and_open_breakers(tmp_path: Path) -> None:
    launch = launched("envoy", tmp_path)
    assert launch.command[launch.command.index("--concurrency") + 1] == "1"
    (cluster,) = json.loads(launch.files["envoy.json"])["static_resources"]["clusters"]
    assert cluster["circuit_breakers"]["thresholds"][0]["max_requests"] >= 100_000


def test_our_own_gateway_has_everything_on(tmp_path: Path) -> None:
    launch = launched("headrace", tmp_path)
    loaded = load_fleet(tmp_path / "fleet.yaml", launch.environment)
    specs = loaded.specs
    assert [spec.url for spec in specs] == [f"http://127.0.0.1:{port}" for port in ENGINE_PORTS]
    assert all(spec.coefficients for spec in specs)
    assert len({spec.price_per_hour for spec in specs}) > 3
    assert launch.environment[KEY_VARIABLE] == "sk-bench"
    assert loaded.config.auth.api_keys_env == (KEY_VARIABLE,)
    assert loaded.config.policy.name == "headrace"
    assert loaded.config.budget_of("interactive").ttft_s is not None


@pytest.mark.real_time
def test_a_program_is_found_in_the_folders_that_are_named_first(tmp_path: Path) -> None:
    script = tmp_path / "gate"
    script.write_text("#!/bin/sh\necho 'gate/4.5.6 (test)'\n")
    script.chmod(0o755)
    target = Target("gate", "gate", "nowhere", lambda site: Launch(()))
    found = find(target, [tmp_path])
    assert found is not None
    assert (found.command, found.version) == ((str(script),), "4.5.6")
    assert find(Target("gate", "no-such-program-here", "nowhere", lambda site: Launch(())), [tmp_path]) is None


@pytest.mark.parametrize(("said", "version"), [
    ("nginx version: nginx/1.22.1", "1.22.1"),
    ("HAProxy version 2.6.12-1+deb12u3 2025/10/03 - https://haproxy.org/", "2.6.12"),
    ("envoy  version: 9e5580933739775e8bce696a57a2e1bc99368f23/1.40.0/Clean/RELEASE/BoringSSL", "1.40.0"),
    ("v0.3.2", "0.3.2"),
    ("no number", None),
])
def test_versions_are_read_from_what_programs_say(said: str, version: str | None) -> None:
    assert version_in(said) == version


def test_options_choose_targets_and_refuse_unknown_ones() -> None:
    assert BenchOptions(quick=True).target_names() == ("headrace", "nginx")
    assert BenchOptions().target_names() == tuple(TARGETS)
    assert BenchOptions(targets=("nginx", "direct")).target_names() == ("nginx",)
    with pytest.raises(UnknownTarget, match=r"apache.*direct, headrace"):
        BenchOptions(targets=("apache",)).target_names()
