"""`canter envs` and `canter presets`: what there is."""

from __future__ import annotations

import inspect
import textwrap

from canter.cli.parser import Parser
from canter.envs.tensor import tensor_envs
from canter.recipes import presets

PROBE = "probe-"

ENVPOOL_AND_GYMNASIUM = """\
Gymnasium: any registered id, such as CartPole-v1 or HalfCheetah-v5 (MuJoCo: pip install "canter[mujoco]").
EnvPool: envpool: and its id, such as envpool:HalfCheetah-v4 (pip install "canter[envpool]").
`canter presets` lists those with known-good settings."""


def envs_command(argv: list[str]) -> None:
    """List the environments and how their ids are written."""
    Parser("envs", usage="", description="List the environments and how their ids are written.").parse(argv)
    print("In torch, for any device:")
    names = [name for name in tensor_envs if not name.startswith(PROBE)]
    width = max(map(len, names))
    for name in names:
        summary = (inspect.getdoc(tensor_envs[name]) or "").partition("\n")[0]
        print(f"  tensor:{name:<{width}}  {summary}")
    probes = ", ".join(name.removeprefix(PROBE) for name in tensor_envs if name.startswith(PROBE))
    text = f"tensor:{PROBE}NAME  Tiny tasks whose answer is known, to test an algorithm; NAME is one of {probes}"
    print(textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    print()
    print(ENVPOOL_AND_GYMNASIUM)


def presets_command(argv: list[str]) -> None:
    """List the known-good settings."""
    Parser(
        "presets",
        usage="",
        description="List the known-good settings; they are found by environment id, or by name with --preset.",
    ).parse(argv)
    rows = [("PRESET", "ENVIRONMENT", "STEPS")]
    rows += [(name, presets[name].env.id, f"{presets[name].total_steps:,}") for name in presets]
    names, ids, steps = (max(map(len, column)) for column in zip(*rows, strict=True))
    for name, env_id, count in rows:
        print(f"{name:<{names}}  {env_id:<{ids}}  {count:>{steps}}")
