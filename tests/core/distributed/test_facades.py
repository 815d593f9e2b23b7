"""`canter.compat`'s runners under torchrun: ranks learn one policy, and the first writes."""

import pytest
from torchrun import torchrun


@pytest.mark.long
def test_source_library_runners_learn_one_policy_and_write_each_file_once(tmp_path):
    out, _ = torchrun(2, __file__.replace("test_facades", "facades"), tmp_path, cwd=tmp_path)
    told = [line.split() for line in out.splitlines() if line.startswith(("rsl_rl ", "rl_games "))]
    for what, steps in (("rsl_rl", 3 * 8 * 8 * 2), ("rl_games", 3 * 16 * 8 * 2)):
        rows = sorted(row[1:] for row in told if row[0] == what)
        assert [row[:3] for row in rows] == [["0", "2", str(steps)], ["1", "2", str(steps)]]
        assert rows[0][3] == rows[1][3], "the weights are the same"
    (experiment,) = [path for path in tmp_path.iterdir() if path.name.startswith("small_")]
    for folder, files in ((tmp_path / "rsl_rl", "model_*.pt"), (experiment / "nn", "small.pth")):
        assert list(folder.glob(files))
    for folder in (tmp_path / "rsl_rl", experiment / "summaries"):
        assert len(list(folder.glob("events.*"))) == 1
    assert (tmp_path / "after.pth").is_file()
