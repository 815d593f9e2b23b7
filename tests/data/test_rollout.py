import torch

from canter.data.rollout import as_sequences


def test_rows_of_length_one_are_numbered_t_times_n_plus_n():
    x = torch.arange(12).view(4, 3)
    assert as_sequences(x, 1).tolist() == [list(range(12))]


def test_sequences_are_consecutive_steps_of_one_environment():
    time, env = torch.arange(6).view(6, 1).expand(6, 2), torch.arange(2).expand(6, 2)
    cut = as_sequences({"time": time, "env": env}, 3)
    assert cut["time"].T.tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert cut["env"].T.tolist() == [[0] * 3, [1] * 3, [0] * 3, [1] * 3]
