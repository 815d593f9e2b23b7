"""The four hooks of an extension, each by what it changes and what it leaves alone."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import canter
from canter.algorithms.extension import Extension
from canter.algorithms.phase import Phase
from canter.core.data.rollout import as_sequences
from canter.core.struct import tree_map
from canter.engines.autograd import LossGradients, LossOutput
from canter.nn.optimizer import Optimizer, OptimizerConfig, ParameterGroup
from canter.training.collector import Collector


@dataclass(frozen=True)
class Added:
    """Settings that build the extension they were given, so that a test can look into it."""

    make: type

    def build(self, spec, model, generator):
        return self.make(spec, model, generator)


class Plain(Extension):
    def __init__(self, spec, model, generator):
        super().__init__()
        self.model, self.generator = model, generator


def collected(*extensions, central=False, **settings):
    """PPO on the cart-pole with these extensions, and a rollout."""
    env = canter.EnvConfig(id="tensor:cartpole", num_envs=4).build("cpu")
    central_value = canter.CentralValueConfig(epochs=1) if central else None
    config = canter.PPOConfig(horizon=8, epochs=1, num_minibatches=2, central_value=central_value, **settings)
    algorithm = replace(config, extensions=tuple(map(Added, extensions))).build(env.spec, 0)
    return algorithm, Collector(env, algorithm, 0)


def evaluate(algorithm, batch):
    """The loss by its definition."""
    algorithm.use_engine("autograd")
    return algorithm.engine.evaluate(batch, algorithm.coefs)


def test_without_hooks_nothing_changes():
    for central in (False, True):
        plain, bare = collected(Plain, central=central), collected(central=central)
        for algorithm, collector in (plain, bare):
            for _ in range(3):
                algorithm.update(collector.collect())
        for mine, other in zip(plain[0].model.parameters(), bare[0].model.parameters(), strict=True):
            assert torch.equal(mine, other)


class Bonus(Plain):
    def reward(self, rollout):
        return rollout.reward * 2 + 1


def test_rewards_chain_and_the_raw_ones_stay():
    algorithm, collector = collected(Bonus, Bonus)
    rollout = collector.collect()
    raw = rollout.reward.clone()
    assert torch.equal(algorithm.with_rewards(rollout).reward, (raw * 2 + 1) * 2 + 1)
    algorithm.update(rollout)
    assert torch.equal(rollout.reward, raw)
    assert collector.read_episodes().mean_reward == pytest.approx(1.0)


class Twice(Plain):
    """Every sequence, and once more with its advantage turned round."""

    def augment(self, batch):
        mirrored = replace(batch, advantage=-batch.advantage)
        both = [torch.cat(pair, dim=1) for pair in zip(leaves(batch), leaves(mirrored), strict=True)]
        return batch.map(lambda x: both.pop(0))


def leaves(batch):
    found = []
    batch.map(lambda x: found.append(x) or x)
    return found


@pytest.mark.parametrize("central", [False, True])
def test_the_loss_is_of_the_augmented_minibatch(central):
    algorithm, collector = collected(Twice, central=central)
    batch, _ = algorithm.prepare_batch(collector.collect())
    # The ratio is 1 before any step, so the surrogate is the mean of the advantages: here that of both signs.
    assert evaluate(algorithm, batch).metrics["loss/policy"].item() == pytest.approx(0.0, abs=1e-7)
    lopsided, bare = replace(batch, advantage=batch.advantage + 1), collected(central=central)[0]
    assert evaluate(bare, lopsided).metrics["loss/policy"].item() == pytest.approx(-1.0, abs=1e-6)


class Small(Plain):
    """Half the square of the distribution parameters, weighed three times."""

    def loss(self, batch, output):
        assert (output.value is None) == self.value_apart
        return {"loss/size": 3.0 * output.dist_params.square().mean(-1) / 2}

    value_apart = False


class SmallApart(Small):
    value_apart = True


@pytest.mark.parametrize("central", [False, True])
def test_a_further_term_adds_its_mean_over_the_valid_samples(central):
    algorithm, collector = collected(SmallApart if central else Small, central=central)
    batch, _ = algorithm.prepare_batch(collector.collect())
    valid = batch.valid.clone()
    valid[:, ::3] = False
    batch = replace(batch, valid=valid)
    output = evaluate(algorithm, batch)
    algorithm.engine.loss = replace(algorithm.engine.loss, terms=())
    without = algorithm.engine.evaluate(batch, algorithm.coefs)
    expected = 1.5 * batch.dist_params.square().mean(-1)[valid].mean()
    torch.testing.assert_close(output.metrics["loss/size"], expected)
    torch.testing.assert_close(output.loss - without.loss, expected)
    assert torch.equal(output.kl, without.kl)


class Guess(Plain):
    """A number that a separate phase pulls towards the mean return."""

    def __init__(self, spec, model, generator):
        super().__init__(spec, model, generator)
        self.number = nn.Parameter(torch.zeros(3))
        config = OptimizerConfig(learning_rate=canter.Linear(0.1))
        optimizer = Optimizer({"number": ParameterGroup([self.number], config)}, clip_jointly=True)
        self.phase = Phase(LossGradients(self.error, optimizer), 2, 4, generator, name="guess")

    def error(self, batch):
        loss = (self.number.sum() - batch.return_.mean()).square()
        return LossOutput(loss, {"guess/error": loss})

    def phases(self):
        return {"guess": self.phase}


def test_a_further_phase_learns_follows_the_schedule_and_resumes():
    (first, collector), (second, _) = collected(Guess), collected(Guess)
    rollout = collector.collect()
    first.set_progress(0.5)
    metrics = first.update(rollout)
    assert metrics["guess/minibatch_updates"] == 8
    assert metrics["guess/learning_rate/number"].item() == pytest.approx(0.05)
    assert first.extensions.each[0].number.abs().min() > 0

    second.load_state_dict(first.state_dict())
    for algorithm in (first, second):
        algorithm.set_progress(0.6)
        algorithm.update(rollout)
    ours, theirs = (algorithm.extensions.each[0] for algorithm in (first, second))
    assert torch.equal(ours.number, theirs.number)
    for mine, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, other)


class Later(Guess):
    """The same on a separate batch: the successors of samples."""

    def __init__(self, spec, model, generator):
        super().__init__(spec, model, generator)
        self.phase.draw = self.draw
        self.seen = []

    def draw(self, rollout):
        return as_sequences(rollout.transitions(["policy"]), length=1)

    def error(self, batch):
        self.seen.append(batch)
        loss = (self.number.sum() - batch.next_obs["policy"].mean()).square()
        return LossOutput(loss, {"guess/error": loss})


def test_a_phase_may_draw_its_own_batch():
    algorithm, collector = collected(Later)
    rollout = collector.collect()
    metrics = algorithm.update(rollout)
    assert metrics["guess/minibatch_updates"] == 8
    seen = torch.cat([batch.next_obs["policy"] for batch in algorithm.extensions.each[0].seen[:4]], 1)
    expected = rollout.transitions().next_obs["policy"].flatten(0, 1)
    assert torch.equal(seen[0].sort(0).values, expected.sort(0).values)
    assert algorithm.engine.name == collected()[0].engine.name


class Ahead(Plain):
    """Reads in the loss what each row led to."""

    def carry(self, rollout):
        sequences = torch.arange(rollout.horizon // 4).view(-1, 1, 1).expand(-1, 4, 1)
        return {"next": rollout.transitions().next_obs, "sequence": sequences.float()}

    def loss(self, batch, output):
        self.batch = batch
        return {"loss/ahead": batch.carried["next"]["policy"].mean(-1)}


def test_batches_carry_requested_data_in_the_order_of_their_samples():
    memory = canter.ModelConfig(policy=canter.NetworkConfig(rnn=canter.RNNConfig(hidden=4)))
    algorithm, collector = collected(Ahead, model=memory, sequence_length=4)
    rollout = collector.collect()
    batch, _ = algorithm.prepare_batch(rollout)
    evaluate(algorithm, batch)
    carried = algorithm.extensions.each[0].batch.carried
    assert torch.equal(carried["next"]["policy"][:-1], batch.obs["policy"][1:])  # no episode ends so soon
    assert carried["sequence"][:, :, 0].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    algorithm.update(rollout)


def test_unread_data_is_not_carried():
    class Reads(Plain):
        def carry(self, rollout):
            raise AssertionError

    algorithm, collector = collected(Reads)
    algorithm.update(collector.collect())


class Doubled(Plain):
    """Every sequence once more, with another action; these rows are not the policy's own."""

    def augment(self, batch):
        other = replace(batch, action=1 - batch.action, original=torch.zeros_like(batch.valid))
        batch = replace(batch, original=torch.ones_like(batch.valid))
        return tree_map(lambda a, b: torch.cat([a, b], 1), batch, other)


def test_added_samples_count_for_the_surrogate_but_not_for_kl_entropy_and_clip_fraction():
    (algorithm, collector), (bare, _) = collected(Doubled), collected()
    batch, _ = algorithm.prepare_batch(collector.collect())
    moved = torch.randn(bare.model.actor.head.linear.weight.shape, generator=torch.Generator().manual_seed(0))
    for each in (algorithm, bare):
        each.model.actor.head.linear.weight.data += 0.1 * moved
    output, plain_output = (evaluate(each, batch) for each in (algorithm, bare))
    torch.testing.assert_close(output.kl, plain_output.kl)
    mine, plain = output.metrics, plain_output.metrics
    for name in ("policy/entropy", "policy/clip_fraction"):
        torch.testing.assert_close(mine[name], plain[name])
    other = evaluate(bare, replace(batch, action=1 - batch.action)).metrics["loss/policy"]
    torch.testing.assert_close(mine["loss/policy"], (plain["loss/policy"] + other) / 2)


def test_two_things_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"extensions: two phases are called 'guess'"):
        collected(Guess, Guess)
    algorithm, collector = collected(Small, Small)
    with pytest.raises(ValueError, match=r"extensions: the loss has a term named 'loss/size' already"):
        algorithm.update(collector.collect())


def test_extensions_of_an_unknown_kind_are_refused_by_name():
    with pytest.raises(ValueError, match=r"algorithm\.extensions\[0\]\.kind: unknown extension 'rdn'"):
        canter.core.plain.from_plain({"algorithm": {"extensions": [{"kind": "rdn"}]}}, canter.TrainConfig())
