"""Rules on stored logs of healthy and faulty runs, and on made-up rows."""

import gzip
import json
from pathlib import Path

import pytest

import canter.algorithms.sac  # noqa: F401  registers SAC and its rules
from canter.algorithms.base import report_spec_for
from canter.algorithms.doctor.amp import AMP_RULES
from canter.algorithms.doctor.findings import MOST, Finding, Rules, Signals, diagnose_signals
from canter.algorithms.doctor.ppo import PPO_RULES
from canter.algorithms.doctor.sac import SAC_RULES
from canter.algorithms.doctor.task import TASK_RULES

STREAMS = json.loads(gzip.decompress((Path(__file__).parent / "streams.json.gz").read_bytes()))
"""Written by `benchmarks/doctor/run.py store`: logs of benchmark runs, with the metrics that rules read."""
TABLES = (TASK_RULES, PPO_RULES)
LOOK = "doctor/return_std"
"""Metric of the rows at which a running run is diagnosed."""


PLANTED = ("saturated_actions",)
"""Rules that no stored run reaches; their tests are on made-up rows."""


def looks(stream):
    """Return the findings at each look of a running run, and at its end."""
    rows = stream["rows"]
    tables = (TASK_RULES, *report_spec_for(stream["settings"]["algorithm.kind"]).rules)
    ends = [i for i, row in enumerate(rows, 1) if LOOK in row or i == len(rows)]
    return [diagnose_signals(Signals(stream["settings"], rows[:end]), tables) for end in ends]


@pytest.mark.parametrize("stream", STREAMS["healthy"], ids=lambda stream: stream["name"])
def test_healthy_runs_have_no_findings(stream):
    assert [finding.rule for findings in looks(stream) for finding in findings] == []


@pytest.mark.parametrize("rule", STREAMS["faulty"])
def test_a_faulty_run_has_the_finding_of_its_fault(rule):
    found = [[finding.rule for finding in findings] for findings in looks(STREAMS["faulty"][rule])]
    assert any(rule in rules for rules in found)
    assert all(len(rules) <= MOST for rules in found)


def test_every_rule_is_explained_and_has_a_stored_faulty_run():
    page = (Path(__file__).parents[3] / "docs/doctor.md").read_text()
    for table in (TASK_RULES, PPO_RULES, SAC_RULES, AMP_RULES):
        for each in (rule for group in table.groups.values() for rule in group):
            name = each.__name__
            assert f'<a id="{name.replace("_", "-")}"></a>`{name}`' in page
            assert name in STREAMS["faulty"] or name in PLANTED


def test_a_cause_hides_its_consequences():
    stream = STREAMS["faulty"]["reward_scale"]  # huge rewards also keep the policy from moving
    signals = Signals(stream["settings"], stream["rows"])
    assert any(rule(signals) for rule in PPO_RULES.groups["settings"])
    assert [finding.rule for finding in diagnose_signals(signals, TABLES)] == ["reward_scale"]


def test_a_finding_has_evidence_and_flags_that_can_be_typed():
    stream = STREAMS["faulty"]["large_updates"]
    (finding,) = diagnose_signals(Signals(stream["settings"], stream["rows"]), TABLES)
    assert finding.evidence[0].value > finding.evidence[0].threshold
    assert finding.flags.startswith("--algorithm.optimizer.learning-rate.start ")
    assert finding.flags.endswith(" --algorithm.target-kl 0.02")
    assert finding.plain()["change"] == dict(finding.change)


def test_a_setting_that_has_the_suggested_value_is_not_suggested():
    def suspicious(signals):
        return Finding((), "Why.", {"algorithm.gamma": 0.9, "algorithm.epochs": 4}, rule="rule", title="Title")

    def suggested(**settings):
        flat = {f"algorithm.{name}": value for name, value in settings.items()}
        return diagnose_signals(Signals(flat, [{"env_steps": 1}] * 4), [Rules(symptoms=(suspicious,))])[0]

    assert suggested(gamma=0.9, epochs=10).flags == "--algorithm.epochs 4"
    finding = suggested(gamma=0.9, epochs=4)
    assert finding.flags == ""
    assert "Change: see docs/does_not_learn.md" in str(finding)


SETTINGS = {"total_steps": 30_000, "algorithm.gamma": 0.99, "algorithm.obs_statistics": "update"}


def rows_of(returns, **columns):
    """Return 30 rows; a column is a value, or a function of the row's number."""
    made = []
    for i in range(30):
        row = {"env_steps": 1000 * (i + 1), "iteration": i + 1, "return": returns(i), "rollout_return": returns(i)}
        row |= {"rollout_reward": 1.0, "rollout_length": 50.0, "length": 50.0, "terminated_rate": 0.5, LOOK: 5.0}
        made.append(row | {name: value(i) if callable(value) else value for name, value in columns.items()})
    return made


def rises(i):
    return 10.0 + 4.0 * i


@pytest.mark.parametrize(
    "rule, rows",
    [
        (None, rows_of(rises)),
        ("nothing_learned", rows_of(lambda i: 10.0 + i % 2)),
        ("fell", rows_of(lambda i: 10.0 + 10.0 * i if i < 20 else 12.0)),
        ("collapse", rows_of(lambda i: 10.0 + i % 9, **{"policy/entropy": lambda i: 0.7 if i < 5 else 0.001})),
        ("eval_differs", rows_of(rises, **{"eval/return": 11.0})),
        (None, rows_of(rises, **{"eval/return": lambda i: 9.0 + 4.0 * i})),
        ("acting_differs", rows_of(rises, **{"doctor/ratio_error": 0.05})),
        (
            "rate_jump",
            rows_of(
                lambda i: 10.0 + 10.0 * i if i < 20 else 20.0,
                **{"optim/learning_rate/model": lambda i: 1e-3 * (1 - i / 21) if i < 20 else 5e-4},
            ),
        ),
    ],
)
def test_rules_without_a_stored_run(rule, rows):
    found = diagnose_signals(Signals(SETTINGS, rows), TABLES)
    assert [finding.rule for finding in found] == ([] if rule is None else [rule])


def test_a_solved_task_is_healthy_whatever_its_kl():
    rows = rows_of(lambda i: min(10.0 + 20.0 * i, 200.0), **{"policy/kl": 0.5, "policy/clip_fraction": 0.9})
    assert diagnose_signals(Signals(SETTINGS, rows), TABLES) == []
    for row in rows:
        row["return"] = 12.0
    assert "large_updates" in [finding.rule for finding in diagnose_signals(Signals(SETTINGS, rows), TABLES)]


def rules_of(settings, rows):
    return [finding.rule for finding in diagnose_signals(Signals(SETTINGS | settings, rows), TABLES)]


@pytest.mark.parametrize("learning", [{"self_play.pool_size": 4}, {"algorithm.extensions": [{"kind": "rnd"}]}])
def test_a_return_that_cannot_rise_yet_is_not_taken_for_small_updates_or_a_small_scale(learning):
    small = rows_of(lambda i: 0.01, **{"policy/kl": 1e-4, "policy/clip_fraction": 0.0})
    assert rules_of({}, small) == ["small_updates"]
    assert "small_updates" not in rules_of(learning, small)
    tiny = rows_of(lambda i: 1e-4 * (i % 2), **{LOOK: 1e-5})
    assert rules_of({}, tiny) == ["reward_scale"]
    assert "reward_scale" not in rules_of(learning, tiny)


@pytest.mark.parametrize("learning", [{"self_play.pool_size": 4}, {"algorithm.extensions": [{"kind": "rnd"}]}])
def test_a_return_that_cannot_rise_yet_says_nothing_about_updates_and_exploration(learning):
    flat = rows_of(lambda i: 10.0 + i % 2, **{"policy/kl": 0.1, "policy/clip_fraction": 0.5})
    assert rules_of({}, flat) == ["large_updates"]
    assert rules_of(learning, flat) == []
    for row in flat:
        row |= {"policy/kl": 0.01, "policy/clip_fraction": 0.1}
    assert rules_of({}, flat) == ["nothing_learned"]
    assert rules_of(learning, flat) == []
    for i, row in enumerate(flat):
        row["policy/entropy"] = 0.6 if i < 5 else 0.01
    assert rules_of({}, flat) == ["nothing_learned", "collapse"]
    assert rules_of(learning, flat) == []


@pytest.mark.parametrize("best, rules", [(11.0, ["no_effect"]), (200.0, [])])
def test_actions_have_an_effect_if_the_return_ever_rose_far(best, rules):
    returns = rows_of(
        lambda i: best if i < 15 else 10.0, **{"doctor/action_effect": 0.9, "policy/kl": 0.01, "policy/std": 0.5}
    )
    returns[0] |= {"return": 10.0, "rollout_return": 10.0}
    assert [rule for rule in rules_of({}, returns) if rule == "no_effect"] == rules


def test_clipped_ratios_are_no_finding_while_the_return_rises():
    clipped = {"policy/kl": 0.04, "policy/clip_fraction": 0.5}
    assert rules_of({}, rows_of(rises, **clipped)) == []
    assert rules_of({}, rows_of(lambda i: 10.0 + i % 2, **clipped)) == ["large_updates"]
    assert rules_of({"algorithm.clip_ratio": 5.0}, rows_of(rises, **clipped)) == ["large_updates"]


@pytest.mark.parametrize("kl, returns, rules", [
    (0.1, rises, []),
    (0.6, rises, ["large_updates"]),
    (0.1, lambda i: 10.0 + i % 2, ["large_updates"]),
])  # fmt: skip
def test_a_large_kl_is_a_finding_while_the_return_rises_only_if_it_is_huge(kl, returns, rules):
    assert rules_of({}, rows_of(returns, **{"policy/kl": kl, "policy/clip_fraction": 0.3})) == rules


@pytest.mark.parametrize("later, rules", [(0.1, []), (0.5, ["large_updates"])])
def test_large_updates_of_the_past_are_not_the_cause_of_a_dip_of_a_policy_that_has_learned(later, rules):
    def rises_and_dips(i):
        return 10.0 + 10.0 * i if i < 20 else 150.0

    clipped = {"policy/kl": 0.03, "policy/clip_fraction": lambda i: 0.5 if i < 15 else later}
    assert rules_of({}, rows_of(rises_and_dips, **clipped)) == rules


def test_large_updates_say_how_many_were_measured():
    def why(**metrics):
        [finding] = diagnose_signals(Signals(SETTINGS, rows_of(lambda i: 10.0 + i % 2, **metrics)), TABLES)
        return finding.rule, finding.why.partition(" the policy")[0]

    once = {"policy/kl": lambda i: 50.0 if i == 1 else 0.0, "policy/entropy": lambda i: 0.001 if i else 0.7}
    assert why(**once) == ("large_updates", "In a single update")
    assert why(**{"policy/kl": 0.5}) == ("large_updates", "By the median of 5 updates")


@pytest.mark.parametrize("fraction, rules", [(0.3, []), (0.7, ["early"])])
def test_a_rule_is_silent_before_its_time_and_carries_its_name(fraction, rules):
    table = Rules()

    @table.rule("symptoms", "Title", after=0.5, unless=("one_step",))
    def early(signals):
        return Finding((), "Why.")

    rows = rows_of(rises)
    signals = Signals({"total_steps": 30_000 / fraction}, rows)
    found = diagnose_signals(signals, [table])
    assert [(finding.rule, finding.title) for finding in found] == [(name, "Title") for name in rules]
    one_step = rows_of(rises, length=1.0)
    assert diagnose_signals(Signals(signals.settings, one_step), [table]) == []


def test_an_untrained_policy_that_always_succeeds_is_suspicious_and_a_trained_one_is_not():
    settings = SETTINGS | {"success.min_return": -200.0, "algorithm.model.std.initial": 1.0}
    rows = rows_of(rises, **{"success_rate": 1.0, "policy/std": 1.0})
    assert [finding.rule for finding in diagnose_signals(Signals(settings, rows), TABLES)] == ["success_from_start"]
    rows = rows_of(rises, **{"success_rate": 1.0, "policy/std": 0.4})
    assert diagnose_signals(Signals(settings, rows), TABLES) == []
