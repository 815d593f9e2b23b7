"""Curiosity: the bonus and the loss by formulas written out here, what it leaves alone, and that it resumes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import canter
from canter.algorithms.extensions.rnd import CLIP
from canter.algorithms.ppo.advantages import AdvantageEstimator
from canter.core.plain import from_plain, to_plain
from canter.training.collector import Collector

SMALL = {"hidden": (8,), "outputs": 3, "num_minibatches": 2}


def build(rnd=None, env="tensor:pendulum", num_envs=4, seed=0, **settings):
    """PPO with curiosity (None: without), and what collects for it."""
    extensions = () if rnd is None else (canter.RNDConfig(**SMALL | rnd),)
    made = canter.EnvConfig(id=env, num_envs=num_envs).build("cpu")
    config = canter.PPOConfig(horizon=8, epochs=2, num_minibatches=2, extensions=extensions, **settings)
    algorithm = config.build(made.spec, seed)
    return algorithm, Collector(made, algorithm, seed)


def parameters(algorithm):
    return torch.cat([p.detach().flatten() for p in algorithm.model.parameters()])


@pytest.mark.parametrize("engine", ["auto", "autograd"])
def test_with_a_weight_of_zero_every_bit_is_that_of_ppo(engine):
    (plain, collects), (curious, collects_too) = build(), build({"weight": canter.Constant(0.0), "share": 0.5})
    for algorithm, collector in ((plain, collects), (curious, collects_too)):
        algorithm.use_engine(engine)
        for _ in range(4):
            algorithm.update(collector.collect())
    assert torch.equal(parameters(plain), parameters(curious))
    assert curious.engine.name == plain.engine.name  # rewards and phases leave the fast engine in use
    rewarded, collects = build({"weight": canter.Constant(1.0)})
    for _ in range(4):
        rewarded.update(collects.collect())
    assert not torch.equal(parameters(plain), parameters(rewarded))


def layers(network):
    return [(p.detach().double().numpy()) for p in network.parameters()]


def forward(weights, x):
    """Two linear layers with an ELU between, in numpy."""
    x = x @ weights[0].T + weights[1]
    x = np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1)
    return x @ weights[2].T + weights[3]


@pytest.mark.parametrize("error", ["square", "norm"])
def test_bonus_and_loss_are_those_of_the_formulas(error):
    """Written out in float64 from the paper: standardise, clip, squared error; divide by the spread of running sums."""
    algorithm, collector = build({"error": error, "weight": canter.Constant(0.3)})
    (rnd,) = algorithm.extensions
    target, predictor = layers(rnd.target), layers(rnd.predictor)
    rollout = collector.collect()
    given = algorithm.with_rewards(rollout).reward.double().numpy()

    x = rollout.transitions().next_obs["policy"].double().numpy()
    rows = x.reshape(-1, 3)
    normal = np.clip((x - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8), -CLIP, CLIP)
    apart = forward(predictor, normal) - forward(target, normal)
    bonus = (apart**2).mean(-1) if error == "square" else np.sqrt((apart**2).sum(-1))
    running, sums = np.zeros(4), []
    for row in bonus:
        running = 0.99 * running + row
        sums.append(running)
    expected = rollout.reward.double().numpy() + 0.3 * bonus / np.std(sums)
    np.testing.assert_allclose(given, expected, rtol=2e-5, atol=1e-6)

    batch = rnd.draw(rollout)
    np.testing.assert_allclose(rnd.prediction_loss(batch).loss.item(), (apart**2).mean(), rtol=2e-5)


def test_only_the_predictor_learns_and_its_error_falls_where_it_has_been():
    algorithm, collector = build({"epochs": 4, "hidden": (32,)})
    (rnd,) = algorithm.extensions
    target = [p.clone() for p in rnd.target.parameters()]
    first = None
    for _ in range(60):
        metrics = algorithm.update(collector.collect())
        first = metrics["loss/rnd"] if first is None else first
    assert metrics["loss/rnd"] < first / 10
    assert all(torch.equal(a, b) for a, b in zip(target, rnd.target.parameters(), strict=True))


class Ends(canter.envs.tensor.TensorEnv):
    """Counts up from 0; every third step ends, and the last observation is 3."""

    def __init__(self):
        super().__init__(
            "test:ends", 2, "cpu", {"policy": canter.TensorSpec((1,))}, canter.Discrete(2), truncates=False
        )

    def _sample_state(self):
        return {"count": torch.zeros(2)}

    def _advance(self, state, action):
        count = state["count"] + 1
        return canter.envs.tensor.Outcome({"count": count}, count * 0, count >= 3)

    def _observe(self, state):
        return {"policy": state["count"].unsqueeze(-1).clone()}


def rollout_of(env, steps=7):
    config = canter.PPOConfig(horizon=steps, num_minibatches=1)
    return Collector(env, config.build(env.spec, 0), 0).collect()


def test_transitions_lead_to_the_true_next_observation():
    rows = rollout_of(Ends()).transitions()
    assert rows.obs["policy"][:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert rows.next_obs["policy"][:, 0, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert rows.valid.all()


def test_where_the_last_observation_is_lost_a_row_is_no_transition():
    rollout = replace(rollout_of(Ends()), final_obs=None)
    rows = rollout.transitions(["policy"])
    assert rows.valid[:, 0].tolist() == [True, True, False, True, True, False, True]
    in_place = replace(rollout, reset=torch.zeros_like(rollout.reset))
    assert in_place.transitions().valid.all()


def test_transitions_without_a_known_successor_earn_and_teach_nothing():
    algorithm, collector = build({"normalize_bonus": False, "normalize_obs": False})
    (rnd,) = algorithm.extensions
    rollout = collector.collect()
    rollout.valid[2] = False
    given = rnd.reward(rollout) - rollout.reward
    assert (given[2] == 0).all() and (given[3] > 0).all()
    batch = rnd.draw(rollout)
    before = rnd.prediction_loss(batch).loss
    batch.x[~batch.valid] = 1e6
    assert torch.equal(rnd.prediction_loss(batch).loss, before)


def test_weights_follow_their_schedule_and_resume_continues_bit_for_bit():
    rnd = {"weight": canter.StepAt(2.0, 0.5, at=0.5), "share": 0.5}
    (first, collector), (second, _) = build(rnd), build(rnd, seed=1)
    weights = []
    for number in range(4):
        first.set_progress(number / 5)
        weights.append(float(first.update(collector.collect())["rnd/weight"]))
        if number == 1:
            second.load_state_dict(first.state_dict())
            replayed = Collector(collector.env, second, 0)
            saved = (collector.state_dict(), [])
    assert weights == [2.0, 2.0, 2.0, 0.5]
    replayed.load_state_dict(saved[0])
    for number in (2, 3):
        second.set_progress(number / 5)
        second.update(replayed.collect())
    mine, theirs = ((a.state_dict()["model"], a.state_dict()["extensions"]) for a in (first, second))
    for part, other in zip(mine, theirs, strict=True):
        assert part.keys() == other.keys() and all(torch.equal(part[key], other[key]) for key in part)


def test_settings_work_in_files_and_flags_and_are_refused_by_name():
    plain = {"algorithm": {"extensions": ["rnd", {"kind": "rnd", "weight": {"kind": "linear", "start": 1.0}}]}}
    config = from_plain(plain, canter.TrainConfig())
    assert config.algorithm.extensions[1].weight == canter.Linear(1.0)
    assert from_plain(to_plain(config), canter.TrainConfig()) == config
    for wrong, message in (
        ({"share": 0.0}, r"extensions\[0\]\.share=0\.0 must lie above 0"),
        ({"outputs": 0}, r"extensions\[0\]\.outputs=0 must be at least 1"),
        ({"wieght": 1.0}, r"wieght: unknown key, did you mean weight\?"),
        ({"weight": {"kind": "adaptive_kl", "start": 1e-3}}, "adaptive_kl is for learning rates"),
    ):
        with pytest.raises(ValueError, match=message):
            from_plain({"algorithm": {"extensions": [{"kind": "rnd", **wrong}]}}, canter.TrainConfig())
    with pytest.raises(ValueError, match=r"obs_groups names 'polcy': did you mean policy\?"):
        build({"obs_groups": ("polcy",)})
    with pytest.raises(ValueError, match=r"rnd: num_minibatches=3 must divide its 32 samples"):
        algorithm, collector = build({"num_minibatches": 3})
        algorithm.update(collector.collect())


VARIED = {
    "weight": canter.Constant(0.1),
    "obs_groups": ("other",),
    "hidden": (5,),
    "target_hidden": (4, 4),
    "outputs": 2,
    "activation": "tanh",
    "variant": "rsl_rl",
    "error": "norm",
    "normalize_obs": False,
    "normalize_bonus": False,
    "bonus_gamma": 0.5,
    "epochs": 3,
    "num_minibatches": 1,
    "share": 0.3,
    "optimizer": canter.OptimizerConfig(learning_rate=canter.Constant(0.1)),
}


def test_every_setting_has_an_effect():
    """On what the policy learns, three updates on."""
    assert set(VARIED) == set(canter.RNDConfig.__dataclass_fields__)

    class TwoGroups(Ends):
        def __init__(self):
            super().__init__()
            self.spec = replace(self.spec, obs=self.spec.obs | {"other": canter.TensorSpec((2,))})

        def _observe(self, state):
            seen = super()._observe(state)
            return seen | {"other": torch.cat([seen["policy"] ** 2, seen["policy"].sin()], -1)}

    def learned(**settings):
        env = TwoGroups()
        extensions = (canter.RNDConfig(**SMALL | settings),)
        # Values in the units of the reward: normalised, the size of a bonus that is alone would not matter.
        model = canter.ModelConfig(normalize_value=False)
        config = canter.PPOConfig(horizon=8, epochs=1, num_minibatches=2, extensions=extensions, model=model)
        algorithm = config.build(env.spec, 0)
        collector = Collector(env, algorithm, 0)
        for _ in range(3):
            algorithm.update(collector.collect())
        return parameters(algorithm)

    base = learned()
    assert torch.equal(base, learned())
    for name, value in VARIED.items():
        assert not torch.equal(base, learned(**{name: value})), name


class TestBonusValue:
    """A second value head, with its own discount."""

    def test_needs_a_bonus(self):
        with pytest.raises(ValueError, match=r"bonus_value has no bonus to evaluate"):
            canter.PPOConfig(bonus_value=canter.BonusValueConfig())

    @pytest.mark.parametrize("trunk", [False, True])
    @pytest.mark.parametrize("episodic", [False, True])
    def test_values_returns_and_advantages_by_formula(self, episodic, trunk):
        """Advantages as sums over the rows that follow, in float64, term by term."""
        config = canter.BonusValueConfig(gamma=0.9, gae_lambda=0.8, episodic=episodic, advantage_coef=0.5)
        algorithm, _ = build({}, bonus_value=config, model=canter.ModelConfig(shared_trunk=trunk))
        env = Ends()
        algorithm = replace(algorithm.config, horizon=7, num_minibatches=1).build(env.spec, 0)
        rollout = algorithm.with_rewards(Collector(env, algorithm, 0).collect())
        assert rollout.bonus.min() > 0 and not rollout.reward.any()
        targets = algorithm.estimator(rollout)
        values = algorithm.model.bonus_values(rollout.obs, (), rollout.reset).double()
        expected = torch.zeros(7, 2, dtype=torch.float64)
        bonus = rollout.bonus.double()
        for n in range(2):
            for t in range(7):
                total = 0.0
                for k in range(t, 7):
                    ended = bool(rollout.done[k, n]) and episodic
                    next_value = 0.0 if ended else values[k + 1, n]
                    delta = bonus[k, n] + 0.9 * next_value - values[k, n]
                    total = total + (0.9 * 0.8) ** (k - t) * delta
                    if ended:
                        break
                expected[t, n] = total
        torch.testing.assert_close(targets.bonus_return.double(), expected + values[:-1], rtol=1e-5, atol=1e-6)
        state = algorithm.model.critic.network.initial_state(2)
        plain = AdvantageEstimator(algorithm.model, algorithm.objective, state, 1)
        plain.engine = algorithm.estimator.engine
        total = plain(rollout).advantage + 0.5 * expected
        torch.testing.assert_close(targets.advantage.double(), total, rtol=1e-5, atol=1e-5)

    def test_a_truncated_episode_is_valued_by_its_last_observation(self):
        algorithm, collector = build({}, bonus_value=canter.BonusValueConfig(episodic=True, gae_lambda=0.0, gamma=0.5))
        rollout = algorithm.with_rewards(collector.collect())
        rollout.truncated[3] = True
        rollout.final_obs["policy"][3] = torch.tensor([1.0, 0.0, 0.5])
        targets = algorithm.estimator(rollout)
        final = algorithm.model.bonus_values({"policy": rollout.final_obs["policy"][3:4]}, (), None)[0]
        torch.testing.assert_close(targets.bonus_return[3], rollout.bonus[3] + 0.5 * final)

    def test_the_second_head_learns_and_fast_engines_decline(self):
        algorithm, collector = build({"weight": canter.Constant(3.0)}, bonus_value=canter.BonusValueConfig())
        assert algorithm.engine.name == "autograd"
        assert "bonus_value" in algorithm.about()["engine"] or not canter.engines.native.AVAILABLE
        before = algorithm.model.bonus_head.linear.weight.clone()
        metrics = algorithm.update(collector.collect())
        assert metrics["loss/bonus_value"] > 0
        assert not torch.equal(before, algorithm.model.bonus_head.linear.weight)
        with pytest.raises(ValueError, match=r"bonus_value is not supported"):
            algorithm.use_engine("native")

    def test_its_error_is_a_term_of_the_loss_with_its_weight(self):
        found = []
        for coef in (1.0, 3.0):
            algorithm, collector = build({}, bonus_value=canter.BonusValueConfig(value_coef=coef))
            batch, _ = algorithm.prepare_batch(algorithm.with_rewards(collector.collect()))
            output = algorithm.engine.evaluate(batch, algorithm.coefs)
            head = algorithm.model.bonus_head
            features, _ = algorithm.model.critic.network(batch.obs, (), None)
            expected = 0.5 * (head(features) - batch.bonus_return).square().mean()
            torch.testing.assert_close(output.metrics["loss/bonus_value"], expected)
            found.append(output.loss - coef * expected)
        torch.testing.assert_close(found[0], found[1])

    @pytest.mark.parametrize("central", [False, True])
    def test_with_a_central_value_the_head_is_learned_in_its_phase(self, central):
        central_value = canter.CentralValueConfig(epochs=1, num_minibatches=2) if central else None
        algorithm, collector = build({}, bonus_value=canter.BonusValueConfig(), central_value=central_value)
        assert (algorithm.losses["policy"].bonus_coef is None) == central
        before = algorithm.model.bonus_head.linear.weight.clone()
        algorithm.update(collector.collect())
        assert not torch.equal(before, algorithm.model.bonus_head.linear.weight)

    def test_a_head_that_gets_no_bonus_is_refused(self):
        class Silent(canter.Extension):
            pass

        algorithm, collector = build({}, bonus_value=canter.BonusValueConfig())
        algorithm.extensions.each = torch.nn.ModuleList([Silent()])
        with pytest.raises(ValueError, match="a separate exploration bonus needs bonus_value"):
            algorithm.update(collector.collect())

    def test_the_critic_file_holds_the_head_of_the_reward(self, tmp_path):
        algorithm, collector = build({}, bonus_value=canter.BonusValueConfig())
        rollout = collector.collect()
        algorithm.update(rollout)
        (write,) = algorithm.artefacts().values()
        write(tmp_path / "critic.safetensors", env_steps=1, return_=None, lta=None)
        loaded = canter.load_critic(tmp_path / "critic.safetensors")
        obs = rollout.obs_at(0)
        mine = algorithm.engine.values({name: group[None] for name, group in obs.items()}, (), None)[0][0]
        torch.testing.assert_close(loaded.value(obs)[0], mine)
