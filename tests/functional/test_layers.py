"""The definitions of layers, by hand; the kernels are compared with them."""

import torch

from canter.functional.layers import batch_norm, linear_layers


def test_batch_norm_divides_by_the_population_std_of_each_feature():
    x = torch.tensor([[[1.0, 10.0], [5.0, 10.0]]])  # [E = 1, B = 2, D = 2]: means 3 and 10, variances 4 and 0
    weight, bias = torch.tensor([[[2.0, 1.0]]]), torch.tensor([[[1.0, 7.0]]])
    y, mean, var = batch_norm(x, weight, bias, 0.0625)
    assert mean.tolist() == [[[3.0, 10.0]]]
    assert var.tolist() == [[[4.0, 0.0]]]
    size = 2.0 * 2.0 / 4.0625**0.5
    torch.testing.assert_close(y, torch.tensor([[[1.0 - size, 7.0], [1.0 + size, 7.0]]]))


def test_linear_layers_apply_the_activation_behind_each():
    first, second = torch.tensor([[1.0, -1.0], [2.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    parameters = [first, torch.tensor([0.0, -1.0]), second, torch.tensor([-10.0])]
    x = torch.tensor([[3.0, 5.0], [8.0, 1.0]])
    # Before the activations: (-2, 5) and (7, 15); 0 + 5 - 10 and 7 + 15 - 10.
    assert linear_layers(x, torch.relu, parameters).tolist() == [[0.0], [12.0]]
