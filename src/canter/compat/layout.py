"""Networks that no file of a source library can hold, refused before such a file is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from canter.algorithms.ppo import PPO
from canter.core.plain import ConfigError
from canter.nn.cnn import CNN, Residual
from canter.nn.distributions import Beta
from canter.nn.mlp import D2RL
from canter.nn.network import Network
from canter.nn.rnn import RNN


def _has(part: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(layer, kind) for layer in part.modules())


def is_impala(network: Network) -> bool:
    """Return True for an encoder of residual blocks."""
    return _has(network.encoders, Residual)


def _images_last(network: Network) -> bool:
    images = [isinstance(encoder, CNN) for encoder in network.encoders]
    return images == sorted(images)


FEATURES: dict[str, Callable[[Network], bool]] = {
    "d2rl=true": lambda network: isinstance(network.hidden, D2RL),
    "layer_norm=true": lambda network: _has(network.hidden, nn.LayerNorm),
    "cnn.features other than null": lambda network: _has(network.encoders, nn.Linear),
    "cnn.kind=impala": is_impala,
    "obs_groups with an image before a vector": lambda network: not _images_last(network),
    "rnn.position=after_mlp": lambda network: not network.rnn_first,
    "rnn.layer_norm=true": lambda network: _has(network.memory, nn.LayerNorm),
    "rnn.concat_input=true": lambda network: network.concat_input,
}
"""Settings of a network that change the layers of a file."""
RL_GAMES = ("d2rl=true", "layer_norm=true", "cnn.features other than null")
"""Features that rl_games 1.6 lacks: it names the layers of d2rl otherwise, and builds layers without norms."""


def check_rl_games(ppo: PPO) -> None:
    """Raise ConfigError for networks whose file rl_games could not load."""
    _check_features(ppo, RL_GAMES, "rl_games")
    if isinstance(ppo.policy.distribution, Beta):
        raise ConfigError("model.distribution=beta: rl_games' policies are Gaussian, tanh-Gaussian or discrete")
    apart = not ppo.model.shared_trunk and ppo.config.central_value is None
    residual = [network for network in _standard(ppo).values() if is_impala(network)]
    if residual and (apart or any(len(network.groups) > 1 for network in residual)):
        raise ConfigError(
            "model.policy.cnn.kind=impala: rl_games' residual network reads one image, and is shared by policy and "
            "values; train with algorithm.model.shared_trunk=true and one observation group"
        )
    shapes = [[parameter.shape for parameter in network.parameters()] for network in _standard(ppo).values()]
    if apart and shapes[:1] != shapes[1:]:
        raise ConfigError(
            "model.critic: rl_games' separate critic reads the policy's observations through the same layers; "
            "leave model.critic out, or train with algorithm.central_value"
        )


def check_rsl_rl(ppo: PPO, generation: int) -> None:
    """Raise ConfigError for networks whose file this generation of RSL-RL could not load."""
    library = f"RSL-RL {generation}.x"
    if ppo.model.shared_trunk:
        raise ConfigError("RSL-RL has two networks: train with algorithm.model.shared_trunk=false to export its file")
    _check_features(ppo, FEATURES, library)
    if isinstance(ppo.policy.distribution, Beta) and generation < 5:
        raise ConfigError(f"model.distribution=beta: {library} has Gaussian policies only; write settings of 5.x")
    if ppo.config.model.std.kind == "network" and generation < 3:
        advice = "write settings of 3.x or later"
        raise ConfigError(f"model.std.kind=network: {library} has no std of the network; {advice}")
    cells = [_cells(network) for network in _standard(ppo).values()]
    if generation <= 3 and cells[:1] != cells[1:]:
        why = f"{library} has the same recurrent layers in policy and critic"
        raise ConfigError(f"model.critic.rnn: {why}; write settings of 5.x")


def _cells(network: Network) -> tuple[bool, int, int] | None:
    """Return LSTM or not, width and number of the recurrent layers; None without any."""
    rnn = network.memory
    return (rnn.is_lstm, rnn.hidden, len(rnn.cells)) if isinstance(rnn, RNN) else None


def _standard(ppo: PPO) -> dict[str, Network]:
    """Return the networks that are no modules of the user's, by their settings' names."""
    parts = {"policy": ppo.model.actor.network, "critic": ppo.model.critic.network}
    return {role: network for role, network in parts.items() if isinstance(network, Network)}


def _check_features(ppo: PPO, features: Iterable[str], library: str) -> None:
    networks = _standard(ppo).items()
    found = [f"{role}.{name}" for role, network in networks for name in features if FEATURES[name](network)]
    if found:
        raise ConfigError(
            f"model.{found[0]}: no file of {library} has such a network; leave it out, or train with "
            "canter train --config FILE, whose own checkpoints have any network"
        )
