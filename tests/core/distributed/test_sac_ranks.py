"""SAC by two ranks: each has its own replay buffer, and both the same weights."""

import torch
from torchrun import torchrun

LEARNS = """
import torch, canter
from canter.core import distributed
from canter.config import TrainConfig
from canter.core.plain import from_plain
from canter.core.distributed.world import world

world.start()
learn = {"kind": "sac", "batch_size": 16, "warmup_steps": 64}
plain = {"env": {"id": "tensor:pendulum", "num_envs": 4}, "algorithm": learn, "total_steps": None}
config = from_plain(plain | {"until": {"iterations": 60}}, TrainConfig())
with canter.Trainer(config, lambda report: None) as trainer:
    trainer.learn()
    state = trainer.algorithm.state_dict()
    kept = {name: state[name] for name in ("modules", "replay", "counters")}
    torch.save(kept, f"rank{distributed.rank()}.pt")
world.end()
"""


def leaves(tree):
    return [tree] if isinstance(tree, torch.Tensor) else [x for part in tree.values() for x in leaves(part)]


def test_ranks_have_the_same_weights_and_replays_of_their_own(tmp_path):
    (tmp_path / "learns.py").write_text(LEARNS)
    torchrun(2, tmp_path / "learns.py", cwd=tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert first["counters"]["updates"] > 100
    mine, theirs = leaves(first["modules"]), leaves(second["modules"])
    assert len(mine) == len(theirs) > 10 and all(map(torch.equal, mine, theirs))
    seen = [leaves(each["replay"]["tables"]) for each in (first, second)]
    assert not all(map(torch.equal, *seen))
