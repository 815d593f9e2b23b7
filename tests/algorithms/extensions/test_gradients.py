"""Parameters that the losses of extensions train, and on which samples."""

from dataclasses import replace

import torch

import canter
from canter.algorithms.extensions.rnd import RND
from canter.algorithms.extensions.symmetry import Symmetries
from canter.engines.base import ModelOutput
from canter.envs.tensor import Pendulum, tensor_envs
from canter.training.collector import Collector


def test_the_predictor_learns_from_its_share_of_the_samples():
    env = Pendulum(512)
    curiosity = canter.RNDConfig(hidden=(8,), outputs=3, share=0.25, normalize_obs=False)
    algorithm = canter.PPOConfig(horizon=8, num_minibatches=1, extensions=(curiosity,)).build(env.spec, 0)
    (rnd,) = algorithm.extensions
    assert isinstance(rnd, RND)
    batch = rnd.draw(Collector(env, algorithm, 0).collect())
    batch.valid[:, ::2] = False
    obs = batch.x.clone().requires_grad_()
    loss = rnd.prediction_loss(replace(batch, x=obs)).loss
    learned = torch.autograd.grad(loss, obs)[0].abs().sum(-1) > 0
    assert not (learned & ~batch.valid).any()
    # Five standard deviations of a share of 1/4 among 2,048 are 0.048.
    assert abs(learned[batch.valid].float().mean().item() - 0.25) < 0.048


def test_the_mirror_loss_moves_the_action_of_the_image_and_not_its_target():
    env = tensor_envs["swimmer"](4)
    symmetry = canter.SymmetryConfig(mirror_loss=0.7)
    algorithm = canter.PPOConfig(horizon=2, num_minibatches=1, extensions=(symmetry,)).build(env.spec, 0)
    (symmetries,) = algorithm.extensions
    assert isinstance(symmetries, Symmetries)
    batch, _ = algorithm.prepare_batch(Collector(env, algorithm, 0).collect())
    samples = batch.valid.shape[1]
    assert isinstance(env.spec.action, canter.Continuous)
    actions = env.spec.action.dim
    generator = torch.Generator().manual_seed(0)
    params = torch.randn(1, 2 * samples, 2 * actions, generator=generator).requires_grad_()
    loss = symmetries.loss(batch, ModelOutput(params, None))["loss/mirror"].mean()
    gradient = torch.autograd.grad(loss, params)[0]
    assert not gradient[:, :samples].any()
    (mirror,) = env.spec.symmetries
    target, image = params.detach()[..., :actions].chunk(2, 1)
    expected = 0.7 * 2 * (image - mirror.action(target)) / (samples * actions)
    torch.testing.assert_close(gradient[:, samples:, :actions], expected)
