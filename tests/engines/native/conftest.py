import pytest
import torch


@pytest.fixture(autouse=True)
def threads_are_put_back():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
