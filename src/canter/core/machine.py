"""The machine and process of a run, and the versions of the packages that it depends on."""

from __future__ import annotations

import gc
import importlib.metadata
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from canter import __version__

PACKAGES = ("torch", "numpy", "gymnasium", "safetensors", "mujoco", "envpool")
"""Packages whose versions are recorded if they are installed, in addition to Canter's own."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection, which is slow and aborts a capture if it frees memory."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def describe_machine() -> dict[str, Any]:
    """Return the system, the processor, the cores that this process may use, and the GPUs."""
    from canter.core.distributed import cores

    return {"system": platform.platform(), "cpu": cpu_model(), "cores": cores(), "gpus": gpu_names()}


def describe_versions() -> dict[str, str]:
    """Return the versions of Python, of Canter's sources and of `PACKAGES`."""
    versions = {"python": platform.python_version(), "canter": __version__}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def cpu_model() -> str:
    """Return the name of the processor as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    # ARM systems report numbers instead of a name.
    parts = [f"{key} {facts[key]}" for key in ("CPU implementer", "CPU part") if key in facts]
    return f"{name} ({', '.join(parts)})" if parts else name


def gpu_names() -> list[str]:
    """Return the names of the GPUs; empty unless CUDA is initialised, which asking would do."""
    import torch

    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def available_memory(device: str = "cpu") -> float:
    """Return the bytes that are free on a device; infinity if the system does not report it."""
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024.0 * int(fields["MemAvailable"].split()[0])
    except (OSError, LookupError, ValueError):
        return math.inf
