"""The scorecard: what its claims make of runs, and the command as a user meets it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace import cli
from loadtest.sim.bound.ratios import Trace
from loadtest.sim.measures import TIME_BINS, Measures, Tally
from loadtest.sim.run import Job, run_job
from loadtest.sim.scorecard.carrying import Carries
from loadtest.sim.scorecard.cases import PEERS, PREDICTING, RULE, TUNED, Case, case
from loadtest.sim.scorecard.costs import Cheaper, OverBound
from loadtest.sim.scorecard.coverage import Covered, CoveredEachAlone, Recovered
from loadtest.sim.scorecard.driving import drive
from loadtest.sim.scorecard.estimates import estimate, jackknife, off_target
from loadtest.sim.scorecard.faults import Noticed, OrderlyWhenHopeless, Undamaged
from loadtest.sim.scorecard.keeping import ROOT, Shelf, code_files, put
from loadtest.sim.scorecard.sample import Sample
from loadtest.sim.scorecard.shares import AsMuchAs, Kept, NotUndercut, Unbeaten
from loadtest.sim.scorecard.table import quick_sections, sections
from loadtest.sim.scorecard.tasks import Answer, Decisions, HindsightFigures, Least, LeastFigures, Task
from policies.registry import BUILT_IN

SECONDS = 400.0
BURST = case("burst")
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def run() -> Measures:
    return run_job(Job("burst", "site", "headrace", 1, 4.0, 60.0))


class Told:
    """A sample whose answers are written by hand."""

    def __init__(self, run: Measures, seeds: tuple[int, ...] = SEEDS) -> None:
        self.run = run
        self.answers: dict[Task, Answer] = {}
        self.sample = Sample("tuning", seeds, SECONDS, "headrace", self.answers)

    def says(self, of: Case, policy: str, shares: Sequence[float], cost: float = 0.1, **more: object) -> None:
        for seed, share in zip(self.sample.seeds, shares, strict=True):
            figures = replace(self.run, in_budget=share, cost_per_1k_in_budget=cost, requests=1000, **more)  # type: ignore[arg-type]
            self.answers[self.sample.job(of, policy, seed)] = figures


@pytest.fixture
def told(run: Measures) -> Told:
    return Told(run)


# --- estimates ----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_leaving_one_out_gives_a_mean_its_usual_error(values: list[float]) -> None:
    whole = estimate(values)
    folded = jackknife(len(values), lambda places: sum(values[place] for place in places) / len(places))
    assert whole is not None
    assert folded is not None
    assert whole.se is not None
    assert folded.se is not None
    assert folded.mean == pytest.approx(whole.mean, abs=1e-9)
    assert folded.se == pytest.approx(whole.se, rel=1e-6, abs=1e-6)
    assert whole.se == pytest.approx(stdev(values) / sqrt(len(values)))


def test_one_value_has_no_error_and_none_is_nothing() -> None:
    assert estimate([0.5]) == (0.5, None)
    assert estimate([]) is None
    assert jackknife(3, lambda places: None) is None


def test_a_share_of_few_is_not_off_and_the_same_of_many_is() -> None:
    assert not off_target(Tally(28, 30), 0.99, 0.005)
    assert off_target(Tally(2800, 3000), 0.99, 0.005)
    assert not off_target(Tally(2956, 3000), 0.99, 0.005)
    assert off_target(Tally(10_000, 10_000), 0.99, 0.005), "too careful is off as well"
    assert not off_target(Tally(10, 10), 0.99, 0.005)
    assert not off_target(Tally(), 0.99, 0.005)


@given(st.integers(0, 40), st.integers(1, 3000))
def test_chance_is_the_binomial_one(missed: int, of: int) -> None:
    from scipy.stats import binomtest

    missed = min(missed, of)
    share = (of - missed) / of
    if share < 0.985:
        p = binomtest(missed, of, 0.015, alternative="greater").pvalue
    elif share > 0.995:
        p = binomtest(missed, of, 0.005, alternative="less").pvalue
    else:
        p = 1.0
    if abs(p - 0.023) > 1e-9:
        assert off_target(Tally(of - missed, of), 0.99, 0.005) == (p < 0.023)


@given(st.integers(1, 10_000), st.floats(0.0, 1.0))
def test_nothing_within_the_tolerance_is_off(of: int, share: float) -> None:
    tally = Tally(round(share * of), of)
    assert tally.share is not None
    if off_target(tally, 0.99, 0.005):
        assert abs(tally.share - 0.99) > 0.005


# --- claims -------------------------------------------------------------------------------------------------------


def test_kept_is_about_the_mean_and_names_the_best_peer(told: Told) -> None:
    told.says(BURST, "headrace", [0.99, 0.98, 1.0], 0.08)
    told.says(BURST, "p2c", [0.90, 0.90, 0.90])
    told.says(BURST, "prequal", [0.95, 0.96, 0.94])
    found = Kept(BURST, 0.99, "", ("p2c", "prequal")).judge(told.sample)
    assert found.holds
    assert found.estimate is not None
    assert found.estimate.se == pytest.approx(0.01 / sqrt(3))
    assert "prequal 95.00 %" in found.beside
    assert "+4.00 ± 1.15 points" in found.beside
    assert "cost -20.0 %" in found.beside
    assert not Kept(BURST, 0.991, "", ()).judge(told.sample).holds


def test_a_rule_may_keep_more_by_chance_and_its_figure_elsewhere_is_no_goal(told: Told) -> None:
    told.says(BURST, "headrace", [0.90, 0.95, 0.99], 0.09)
    told.says(BURST, RULE, [0.94, 0.95, 0.96])
    found = AsMuchAs(BURST, 0.999, "", (RULE,)).judge(told.sample)
    assert found.holds
    assert found.measured == "-0.33 ± 2.03 points"
    assert found.beside == f"94.67 %, {RULE} 95.00 %, cost -10.0 %; the plan's 99.9 %"
    told.says(BURST, RULE, [0.901, 0.951, 0.991])
    found = AsMuchAs(BURST, 0.5, "", (RULE,)).judge(told.sample)
    assert not found.holds, "always a little more"
    assert found.estimate is not None
    assert found.estimate.mean == pytest.approx(-0.001)


def test_a_rule_is_as_good_as_itself(told: Told) -> None:
    sample = replace(told.sample, subject=RULE)
    for seed in SEEDS:
        told.answers[sample.job(BURST, RULE, seed)] = told.run
    claim = AsMuchAs(BURST, 0.999, "", (RULE,))
    assert len(claim.tasks(sample)) == len(SEEDS)
    assert claim.judge(sample).holds


def test_beaten_is_beaten_by_more_than_one_standard_error_of_the_paired_difference(told: Told) -> None:
    told.says(BURST, "headrace", [0.90, 0.95, 0.99])
    told.says(BURST, "always_a_little_better", [0.901, 0.951, 0.991])
    told.says(BURST, "now_better_now_worse", [0.93, 0.95, 0.97])
    found = Unbeaten("peers", (BURST,), ("always_a_little_better", "now_better_now_worse"), "").judge(told.sample)
    assert not found.holds
    assert found.measured == "1 of 2"
    assert "always_a_little_better +0.10" in found.beside
    assert Unbeaten("peers", (BURST,), ("now_better_now_worse",), "").judge(told.sample).holds


def test_undercut_is_cheaper_and_nearly_as_good(told: Told) -> None:
    told.says(BURST, "headrace", [0.99] * 3, 0.10)
    told.says(BURST, "cheap_and_near", [0.986] * 3, 0.099)
    told.says(BURST, "cheap_and_worse", [0.98] * 3, 0.05)
    told.says(BURST, "dear", [0.99] * 3, 0.11)
    found = NotUndercut("peers", (BURST,), ("cheap_and_near", "cheap_and_worse", "dear"), "").judge(told.sample)
    assert not found.holds
    assert found.measured == "1 of 3"
    assert "cheap_and_near" in found.beside
    assert NotUndercut("peers", (BURST,), ("cheap_and_worse", "dear"), "").judge(told.sample).holds


def test_cost_is_held_against_the_cheapest_that_keeps_as_much(told: Told) -> None:
    peers = ("good_and_dear", "good", "cheap_and_bad", PREDICTING[0])
    told.says(BURST, "headrace", [0.99] * 3, 0.08)
    told.says(BURST, "good_and_dear", [0.99] * 3, 0.20)
    told.says(BURST, "good", [0.99] * 3, 0.10)
    told.says(BURST, "cheap_and_bad", [0.90] * 3, 0.01)
    told.says(BURST, PREDICTING[0], [0.98] * 3, 0.16)
    found = Cheaper(BURST, 0.12, "", peers).judge(told.sample)
    assert found.holds
    assert found.measured == "20.0 ± 0.0 %"
    assert found.beside.endswith("of at least our share: good")
    assert not Cheaper(BURST, 0.21, "", peers).judge(told.sample).holds
    told.says(BURST, "headrace", [0.999] * 3, 0.08)
    alone = Cheaper(BURST, 0.12, "", peers).judge(told.sample)
    assert alone.estimate is not None
    assert alone.estimate.mean == pytest.approx(0.5), "nobody keeps as much: the predicting one is the measure"


def test_over_the_bound_asks_for_bounds_once_the_runs_are_known(told: Told) -> None:
    claim = OverBound(BURST, 1.2, "", evaluations=10)
    before = claim.tasks(told.sample)
    assert not any(isinstance(task, Least) for task in before)
    told.says(BURST, "headrace", [0.99] * 3, 0.1)
    bounds = [task for task in claim.tasks(told.sample) if isinstance(task, Least)]
    assert [task.good for task in bounds] == [990] * 3
    for task, least in zip(bounds, (0.0990 / 1.1, 0.0990 / 1.3, None), strict=True):
        told.answers[task] = LeastFigures(least, 1000.0)
    (hindsight,) = [task for task in before if task not in told.answers]
    told.answers[hindsight] = HindsightFigures(1.25, 1.1)
    found = claim.judge(told.sample)
    assert found.estimate is not None
    assert found.estimate.mean == pytest.approx(1.2), "seeds of which the bound says nothing are left out"
    assert "with hindsight 1.100" in found.beside


def test_capacity_climbs_until_three_rates_in_a_row_fail(told: Told) -> None:
    claim = Carries("burst", "site", "p2c", ("p2c",), 1.3, "", (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    curves = {"headrace": [1.0, 1.0, 1.0, 0.98, 0.97, 0.96], "p2c": [1.0, 0.98, 0.97, 0.96]}
    asked: set[Task] = set()
    while wanted := [task for task in claim.tasks(told.sample) if task not in told.answers]:
        for job in wanted:
            assert job not in asked
            asked.add(job)
            share = curves[job.policy][round(job.rate_per_s) - 1]
            told.answers[job] = replace(told.run, in_budget=share)
    assert len(asked) == 3 * (6 + 4), "p2c is given up after 4/s"
    found = claim.judge(told.sample)
    assert found.estimate is not None
    assert found.estimate.mean == pytest.approx(3.5 / 1.5)
    assert found.beside == "headrace 3.5/s, p2c 1.5/s"


def test_capacity_over_nothing_holds_only_for_who_has_some(told: Told) -> None:
    claim = Carries("burst", "site", "p2c", ("p2c",), 1.3, "", (1.0,))
    told.says(Case("burst", "site", 1.0), "p2c", [0.5] * 3)
    told.says(Case("burst", "site", 1.0), "headrace", [1.0] * 3)
    assert claim.judge(told.sample).holds
    told.says(Case("burst", "site", 1.0), "headrace", [0.9] * 3)
    assert not claim.judge(told.sample).holds


def test_a_slowdown_has_to_be_noticed_under_every_seed(told: Told) -> None:
    faulty, sound = case("degrades-silently"), case("burst", "site", 5.0)
    claim = Noticed(faulty, 2.0, "")
    told.says(faulty, "headrace", [0.99] * 3, detection_s=1.5)
    assert claim.judge(told.sample).holds
    last = told.sample.job(faulty, "headrace", 3)
    for seconds in (None, 2.5):
        told.answers[last] = replace(told.run, in_budget=0.99, detection_s=seconds)
        assert not claim.judge(told.sample).holds
    told.says(sound, "headrace", [0.995] * 3)
    assert not Undamaged(faulty, sound, 0.003, "").judge(told.sample).holds
    assert Undamaged(faulty, sound, 0.006, "").judge(told.sample).holds


def test_the_hopeless_are_judged_by_the_last_percent_of_first_tokens(told: Told) -> None:
    unshed = case("unshed")
    told.says(unshed, "headrace", [0.9] * 3, ttft_cdf=(*[0.5] * 99, 3.0, 50.0))
    found = OrderlyWhenHopeless(unshed, 4.8, "", ()).judge(told.sample)
    assert found.holds
    assert found.estimate is not None
    assert found.estimate.mean == 3.0
    assert not OrderlyWhenHopeless(unshed, 2.9, "", ()).judge(told.sample).holds


def test_each_backend_and_class_is_covered_for_itself(told: Told) -> None:
    even, lopsided = Tally(990, 1000), Tally(950, 1000)
    told.says(BURST, "headrace", [1.0] * 3, coverage={"a": {"chat": even}, "b": {"chat": lopsided, "code": even}},
              coverage_p99=0.99)
    assert Covered(BURST, 0.005, "").judge(told.sample).holds
    found = CoveredEachAlone(BURST, 0.005, "").judge(told.sample)
    assert not found.holds
    assert found.cells["b"]["chat"] == Tally(2850, 3000), "counts are added over seeds"
    assert "b/chat 95.00 % of 3000" in found.beside
    told.says(BURST, "headrace", [1.0] * 3, coverage={}, coverage_p99=None)
    assert not Covered(BURST, 0.005, "").judge(told.sample).holds, "who predicts nothing covers nothing"
    assert not CoveredEachAlone(BURST, 0.005, "").judge(told.sample).holds


def test_recovery_is_when_no_later_window_is_off(told: Told) -> None:
    drift = case("coefficient-drift")
    claim = Recovered(drift, 120.0, 0.005, "")

    def bins(bad_until_s: float) -> tuple[Tally, ...]:
        """The change comes at 120 s; a bin is 5 s."""
        return tuple(Tally(150 if 120 <= 5 * place < bad_until_s else 198, 200) for place in range(TIME_BINS))

    told.says(drift, "headrace", [1.0] * 3, coverage_timelines={"h100-fp8": bins(0), "a100-w8a8": bins(200)})
    found = claim.judge(told.sample)
    assert found.holds
    assert found.measured == "90 s"
    told.says(drift, "headrace", [1.0] * 3, coverage_timelines={"a100-w8a8": bins(300)})
    assert not claim.judge(told.sample).holds


def test_the_table_asks_for_each_case_of_the_plan_and_knows_every_policy() -> None:
    claims = [claim for section in sections() for claim in section.claims]
    assert len({(claim.says, claim.goal, claim.source) for claim in claims}) == len(claims)
    assert all(claim.goal and claim.source for claim in claims)
    assert set(PREDICTING) <= set(PEERS) <= set(BUILT_IN.presets)
    assert {peer.partition(":")[0] for peer in TUNED} <= set(BUILT_IN.presets)
    assert RULE in BUILT_IN.presets
    assert RULE not in PEERS, "it is no balancer of others"
    assert {section.name for section in quick_sections()} == {section.name for section in sections()}


# --- keeping ------------------------------------------------------------------------------------------------------


def test_what_is_kept_comes_back_whole_and_only_for_the_same_code(tmp_path: Path, run: Measures) -> None:
    shelf, job = Shelf(tmp_path, "code"), Job("burst", "site", "headrace", 1, 4.0, 60.0)
    assert shelf.find(job) is None
    for task, answer in ((job, run), (Least(told_trace(), 9), LeastFigures(None, 9.5))):
        place = shelf.place(task)
        assert place is not None
        put(answer, place)
        assert shelf.find(task) == answer
        assert Shelf(tmp_path, "other code").find(task) is None
        place.write_bytes(place.read_bytes()[:-5])
        assert shelf.find(task) is None, "a torn file is none"
    assert shelf.place(Decisions("headrace", 8, 10)) is None
    assert not list(tmp_path.glob("*.part"))


def told_trace() -> Trace:
    return Trace("burst", "site", 1, 4.0, 60.0)


@pytest.mark.real_time
def test_all_that_a_run_imports_is_in_the_hash() -> None:
    """Of the router, books and one constant; of engines, what the router imports with them."""
    listing = ("import sys; import loadtest.sim.scorecard.tasks, loadtest.sim.bound.comparison;"
               "print('\\n'.join(filter(None, (getattr(m, '__file__', None) for m in list(sys.modules.values())))))")
    printed = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True, cwd=ROOT,
                             timeout=60).stdout
    ours = {Path(line) for line in printed.splitlines()}
    packages = [ROOT / name for name in ("backends/catalog", "policies", "loadtest")]
    loaded = {file for file in ours if any(file.is_relative_to(package) for package in packages)}
    assert len(loaded) > 50
    assert loaded - set(code_files()) == {ROOT / "loadtest/sim/scorecard/__init__.py"}
    assert {ROOT / "router/fleet/leases.py", ROOT / "router/fleet/live.py"} <= set(code_files())


def test_a_scorecard_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    answers: dict[Task, Answer] = {}
    sample = Sample("tuning", (1, 2), 40.0, "p2c", answers)
    claims = [Kept(Case("steady", "site", 2.0), 0.5, "", ("round_robin",))]
    drive(claims, [sample], answers, 1, Shelf(tmp_path, "code"))
    assert len(answers) == 4
    written = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(written) == 4
    (first, *_) = written
    first.unlink()
    again: dict[Task, Answer] = {}
    drive(claims, [replace(sample, answers=again)], again, 1, Shelf(tmp_path, "code"))
    assert again.keys() == answers.keys()
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir() if file != first} == {
        file: at for file, at in written.items() if file != first}
    assert first.exists()


# --- the command --------------------------------------------------------------------------------------------------

SIMULATED = "share,rule,peers,capacity,cost,bound,hopeless,faults,coverage"
"""All but the one that depends on the machine."""


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli.app, ["sim", "scorecard", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_quick_holds_for_the_shipped_policy_and_not_for_round_robin(tmp_path: Path) -> None:
    page = tmp_path / "reports" / "card.html"
    code, out, err = invoke(SIMULATED, "--quick", "--json", "--html", str(page))
    card = json.loads(out)
    failing = [claim["says"] for section in card["sections"] for claim in section["claims"] if not claim["holds"]]
    assert failing == []
    assert code == 0
    assert "of one core" in err
    assert [(table["pool"], table["seeds"]) for table in card["tables"]] == [("site", "tuning"), ("site", "unseen")]
    (bursts,) = card["tables"][0]["cases"]
    assert list(bursts["policies"]) == ["headrace", "weighted_least_request", "shortest_expected_delay", RULE]
    assert bursts["policies"]["headrace"]["in_budget"] == card["sections"][0]["claims"][0]["tuning"]["mean"]
    assert card["seeds"] == {"tuning": [1], "unseen": [11]}
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert json.loads(page.with_suffix(".json").read_text("utf-8")) == card

    code, out, _ = invoke(SIMULATED, "--quick", "--json", "--subject", "round_robin")
    assert code == 1
    verdicts = {section["name"]: [claim["holds"] for claim in section["claims"]]
                for section in json.loads(out)["sections"]}
    assert verdicts["share"] == [False]
    assert verdicts["peers"][0] is False, "others keep more"
    assert not any(verdicts["coverage"]), "it predicts nothing"


def test_the_table_says_what_holds_and_what_does_not() -> None:
    code, out, _ = invoke("share,coverage", "--quick", "--subject", "round_robin")
    assert code == 1
    assert "does not hold" in out
    assert "round_robin: 0 of 4 claims hold (tuning seeds 1, unseen seeds 11; 60 s; code " in out.splitlines()[-1]
    code, out, _ = invoke("coverage", "--quick")
    assert code == 0
    assert "within the predicted P99, % (of how many)" in out
    assert "in budget % ± se / cost" not in out, "no section has run that"
    code, out, _ = invoke("decisions", "--quick", "--json")
    ((claim,),) = [section["claims"] for section in json.loads(out)["sections"]]
    assert claim["tuning"]["mean"] > 0.0
    assert "unseen" not in claim, "it is of the machine, not of seeds"


@pytest.mark.parametrize(("arguments", "said"), [
    (("--seeds", "1-3", "--unseen", "3-5"), "seed 3 is among the tuning seeds"),
    (("nothing",), "no section 'nothing'"),
    (("--subject", "nobody"), "no preset 'nobody'"),
    (("--policies", "nobody"), "no preset 'nobody'"),
    (("--seconds", "20"), "warm-up"),
])
def test_mistakes_are_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    code, out, err = invoke(*arguments)
    assert code == 2
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
