"""Who sees what in a team: a policy its own observation, MAPPO's critic the joint state, IPPO's what its agent sees."""

import torch

from canter.config.presets import presets
from canter.core.plain import from_plain
from canter.envs.tensor import Rendezvous


def outputs(algorithm, obs):
    """Distribution parameters and values `[agents, ...]` of one world's observations `[1, agents, ...]`."""
    with torch.no_grad():
        params, _ = algorithm.model.actor(obs, (), None)
        value, _ = algorithm.model.critic.unroll(obs, (), None)
    return params[0], value[0]


def before_and_after(joint_critic):
    """Return the outputs of a team's actor and critic before and after its third agent has moved."""
    worlds = Rendezvous(1, num_agents=3)
    preset = presets["Rendezvous"]
    if not joint_critic:
        preset = from_plain({"algorithm": {"model": {"critic": {"obs_groups": ["policy"]}}}}, preset)
    algorithm = preset.algorithm.build(preset.env.build("cpu").spec, seed=0)
    before = outputs(algorithm, worlds.reset(seed=0))
    worlds._state["position"][0, 2] += 0.3
    return *before, *outputs(algorithm, worlds.observe())


def test_mappo_values_what_its_agent_cannot_see():
    params, value, later_params, later_value = before_and_after(joint_critic=True)
    # The first agent sees only the second: its policy cannot tell, its critic can.
    assert torch.equal(params[0], later_params[0])
    assert not torch.equal(params[1], later_params[1])
    assert (value - later_value).abs().min() > 1e-4


def test_mappo_values_each_agent_by_itself():
    _, value, _, _ = before_and_after(joint_critic=True)
    assert len(set(value.tolist())) == 3  # the joint state is the same for all, the agent's number is not


def test_ippo_values_only_what_its_agent_sees():
    params, value, later_params, later_value = before_and_after(joint_critic=False)
    assert torch.equal(params[0], later_params[0])
    assert torch.equal(value[0], later_value[0])
    assert not torch.equal(value[1], later_value[1])
