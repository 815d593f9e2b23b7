"""Parameters of action distributions, by hand."""

import math

import pytest
import torch

from canter.functional.densities import gaussian_params, to_log_std

MID = math.log(0.5)
HALF = 2.0


@pytest.mark.parametrize(
    ("form", "log_std"),
    [
        ("bounded", MID + HALF * 0.75 / 1.25),  # x = 1.5 / 2, and sqrt(1 + x^2) = 1.25
        ("tanh", MID + HALF * math.tanh(1.5)),
        ("log", 1.5),
        ("scalar", math.log(1.5)),
        ("softplus", math.log(math.log(1 + math.exp(1.5)))),
        ("linear", math.log(math.log(1 + math.exp(1.5)))),
    ],
)
def test_the_log_std_of_a_raw_parameter(form, log_std):
    raw = torch.tensor([1.5], dtype=torch.float64)
    assert to_log_std(raw, MID, HALF, form).item() == pytest.approx(log_std, rel=1e-12)
    params = gaussian_params(torch.zeros((3, 1), dtype=torch.float64), raw, MID, HALF, form)
    torch.testing.assert_close(params, torch.tensor([[0.0, log_std]] * 3, dtype=torch.float64))
