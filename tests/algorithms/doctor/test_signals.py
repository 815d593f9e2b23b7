"""The measured effect of actions, on rollouts whose dependence is known."""

import torch

from canter.algorithms.doctor.ppo import NO_EFFECT
from canter.algorithms.doctor.signals import action_effect
from canter.core.data.rollout import Rollout

T = 64
N = 16


def effect(seed, change):
    """Return the effect of a noise `[T, N, 1]` on a step that `change(noise, state, random)` defines."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn((T, N), generator=generator)

    noise = normal()
    state = torch.cat([normal(), torch.randn((1, N), generator=generator)])
    reward, shift = change(noise, state[:-1], normal())
    flags = torch.zeros((T, N), dtype=torch.bool)
    obs = torch.stack([state, torch.cat([torch.zeros(1, N), shift.cumsum(0)])], -1)
    rollout = Rollout(
        obs={"policy": obs}, reward=reward, terminated=flags, truncated=flags, valid=~flags, duration=torch.ones(T, N),
        final_obs=None, reset=torch.zeros((T + 1, N), dtype=torch.bool), state=(), record=(),
    )  # fmt: skip
    z = noise.unsqueeze(-1)
    return float(action_effect(torch.cat([z, z.abs()], -1), rollout)["action_effect"])


def test_actions_without_effect_stay_at_chance():
    # Of 100 seeds one was above the threshold, at 1.42; these five are below.
    assert all(effect(seed, lambda noise, state, random: (random, state)) < NO_EFFECT for seed in range(5))


def test_rare_jumps_are_no_effect():
    def jumps(noise, state, random):
        return (random > 2.0) * 1e4, state

    assert all(effect(seed, jumps) < NO_EFFECT for seed in range(5))


def test_a_linear_effect_is_seen_in_noise_five_times_as_large():
    assert effect(0, lambda noise, state, random: (random, 0.2 * noise + random)) > NO_EFFECT


def test_a_reward_that_is_the_negative_square_of_the_action_is_an_effect():
    # The linear correlation of a symmetric variable and its square is 0; that with its amount is
    # Cov(|z|, z^2) / (Std |z| Std z^2) = sqrt(2/pi) / sqrt(2 - 4/pi) = 0.94.
    assert effect(0, lambda noise, state, random: (-noise.square(), state)) > 5.0


def test_an_effect_whose_sign_depends_on_the_state_is_seen():
    assert effect(0, lambda noise, state, random: (random, state.sign() * noise)) > 5.0
