import pytest
import torch


@pytest.fixture(autouse=True)
def strict_float32():
    """The same numbers for every test, and products as exact as the plain functions they are held against."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    yield
    torch.set_float32_matmul_precision(before)
