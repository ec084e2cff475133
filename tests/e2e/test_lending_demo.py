"""The lending demo from its beginning to its end, on simulated engines and a short wave: a loan, a recall, no loss."""

import asyncio
import json
from pathlib import Path

import pytest

from headrace.up import engine_sets, run
from headrace.up.run import UpOptions, run_up
from headrace.up.scene import Scene
from tests.processes import is_running

SHORT = Scene(period_s=26.0, periods=2.6, bin_s=2.6, prelude_s=4.0, grace_s=3.0, peak_share=0.75, is_even=True)


@pytest.mark.timeout(240)
def test_a_replica_is_lent_in_the_trough_and_back_before_the_crest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_sets, "SIMULATED", SHORT)
    monkeypatch.setattr(run, "FIRST_ENGINE_PORT", 9701)      # `up` takes the lowest free ones, and may run beside this
    run_dir = tmp_path / "run"
    options = UpOptions(engines="simulated", port=0, admin_port=0, run_dir=run_dir, json=True, time_scale=0.5,
                        demo="lending")
    code = asyncio.run(run_up(options))
    account = json.loads(capsys.readouterr().out)
    print(json.dumps(account, indent=1))

    assert account["failed"] == 0, account["failures"]
    assert account["requests"] > 60
    assert account["p99_kept"] == {"ttft_s": True, "inter_token_s": True, "e2e_s": True}
    recalled = [loan for loan in account["loans"] if loan["recall_to_serving_s"] is not None]
    assert recalled, "no loan was recalled and came back"
    for loan in recalled:
        assert SHORT.period_s * 0.8 < loan["lent_at_s"] < loan["recalled_at_s"] < loan["serving_at_s"]
        assert loan["recall_reason"] == "slack_negative", "it was not the demand that called it back"
    assert account["training_steps"] > 0, "the training has nothing to show for the loan"
    assert account["ok"] is (code == 0)
    assert code == 0

    for record in (run_dir / "allocator" / "runs").glob("*/started.json"):
        assert not any(is_running(pid) for pid, _ in json.loads(record.read_text())["members"])
    fleet = (run_dir / "fleet.yaml").read_text()
    assert "lending:" in fleet
