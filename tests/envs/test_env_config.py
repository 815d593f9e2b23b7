import pytest
import torch

from canter.envs import EnvConfig
from canter.specs import Continuous


def ends(config, steps=12):
    """Which steps were truncated and which terminated, in the first environment."""
    env = config.build("cpu")
    env.reset(0)
    action = env.spec.action
    still = torch.zeros(config.num_envs, action.dim) if isinstance(action, Continuous) else torch.zeros(2).long()
    flags = [(step.truncated[0].item(), step.terminated[0].item()) for step in (env.step(still) for _ in range(steps))]
    truncates = env.spec.truncates
    env.close()
    return [t for t, (cut, _) in enumerate(flags) if cut], any(ended for _, ended in flags), truncates


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "tensor:queue", "tensor:pendulum", "tensor:probe-cycle"])
def test_reset_steps_cuts_episodes_without_ending_them(env_id):
    assert ends(EnvConfig(id=env_id, num_envs=2, reset_steps=5)) == ([4, 9], False, True)


def test_reset_steps_cuts_environments_of_envpool():
    pytest.importorskip("envpool")
    # The step after a cut is a filler row there.
    assert ends(EnvConfig(id="envpool:Pendulum-v1", num_envs=2, reset_steps=5)) == ([4, 10], False, True)


def test_without_it_the_environment_keeps_its_own_limit():
    assert ends(EnvConfig(id="tensor:probe-cycle", num_envs=2)) == ([], False, False)
    assert ends(EnvConfig(id="tensor:queue", num_envs=2, options={"max_episode_steps": 6}))[0] == [5, 11]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reset_steps": 0}, "env.reset_steps=0 must be at least 1"),
        ({"num_envs": 0}, "env.num_envs=0 must be at least 1"),
        ({"reset_steps": 5, "finite_horizon": True}, "reset_steps=5 leaves no room for env.finite_horizon"),
        ({"reset_steps": 5, "options": {"max_episode_steps": 9}}, "leaves no room for env.options.max_episode_steps"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EnvConfig(**settings)
