"""From what is asked for to what a shim can run: checks a launch and works out each member's environment."""

import os
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from allocator.execution.devices import visibility_env
from allocator.execution.engine import BadLaunch
from allocator.execution.processes import DEVICES_VARIABLE, RUN_VARIABLE
from allocator.execution.record import Plan, RunFolder
from allocator.execution.values import Acknowledgement, Launch, Member

PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
"""What members inherit of the allocator's environment. The rest stays here: it may hold keys that are not theirs."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NOT_FOR_SAVING = {signal.SIGKILL, signal.SIGSTOP}


def make_plan(
    launch: Launch, folder: RunFolder, environ: Mapping[str, str], *, nonce: str, kill_margin_s: float
) -> Plan:
    """The plan of a launch, without a control group. Raises BadLaunch for what cannot run, member by member."""
    _check(launch)
    working_folder = str(Path(launch.folder).absolute())
    if not os.path.isdir(working_folder):
        raise BadLaunch(f"run {launch.run_id}: its working folder {working_folder} does not exist")
    envs = []
    for rank, member in enumerate(launch.members):
        env = _environment(launch, rank, member, folder, environ, nonce)
        program = member.argv[0]
        found = shutil.which(program if "/" not in program else os.path.join(working_folder, program),
                             path=env.get("PATH"))
        if found is None:
            raise BadLaunch(f"run {launch.run_id}, member {rank}: no program {program!r} that may be executed"
                            + ("" if "/" in program else f" in PATH={env.get('PATH')}"))
        envs.append(env)
    return Plan(
        run_id=launch.run_id, epoch=launch.epoch, nonce=nonce, argvs=tuple(member.argv for member in launch.members),
        envs=tuple(envs), folder=working_folder, checkpoint_signal=launch.checkpoint.signal,
        acknowledged_by_file=launch.checkpoint.acknowledgement is Acknowledgement.FILE,
        linger_s=launch.checkpoint.linger_s, kill_margin_s=kill_margin_s,
    )


def _check(launch: Launch) -> None:
    if not launch.members:
        raise BadLaunch(f"run {launch.run_id}: a gang has at least one member")
    devices = launch.devices
    twice = sorted({str(device) for device in devices if devices.count(device) > 1})
    if twice:
        raise BadLaunch(f"run {launch.run_id}: {', '.join(twice)} is given to two members")
    if len({device.vendor for device in devices}) > 1:
        raise BadLaunch(f"run {launch.run_id}: one run, one type of card; these are of "
                        + ", ".join(sorted({device.vendor for device in devices})))
    if launch.checkpoint.signal not in signal.valid_signals() - NOT_FOR_SAVING:
        raise BadLaunch(f"run {launch.run_id}: signal {launch.checkpoint.signal} cannot ask for a checkpoint")
    if not launch.checkpoint.linger_s >= 0:
        raise BadLaunch(f"run {launch.run_id}: linger_s must not be negative, not {launch.checkpoint.linger_s}")


def _environment(
    launch: Launch, rank: int, member: Member, folder: RunFolder, environ: Mapping[str, str], nonce: str
) -> dict[str, str]:
    who = f"run {launch.run_id}, member {rank}"
    if not member.argv or any("\0" in text for text in (*member.argv, *member.env, *member.env.values())):
        raise BadLaunch(f"{who}: a command has at least one word, and nothing in it or its environment a zero byte")
    bad = [name for name in member.env if not name or "=" in name]
    if bad:
        raise BadLaunch(f"{who}: {bad[0]!r} is no name for a variable")
    try:
        visible = visibility_env(member.devices)
    except ValueError as error:
        raise BadLaunch(f"{who}: {error}") from error
    return {
        **{name: environ[name] for name in PASSED_ON if name in environ},
        **visible,
        "RANK": str(rank),
        "WORLD_SIZE": str(len(launch.members)),
        "HEADRACE_RUN_ID": launch.run_id,
        "HEADRACE_CHECKPOINT_ACK": str(folder.ack_path(rank).absolute()),
        **member.env,
        # Last: by these two a process is known as ours, whatever the launch says.
        RUN_VARIABLE: f"{launch.run_id}/{nonce}",
        DEVICES_VARIABLE: ",".join(map(str, member.devices)),
    }
