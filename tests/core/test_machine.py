import json

import numpy as np
import torch

import canter
from canter.core import machine
from canter.core.distributed import cores
from canter.core.machine import cpu_model, describe_machine, describe_versions


def test_machine_and_versions_are_plain_data_that_say_what_is_here():
    versions = describe_versions()
    assert versions["canter"] == canter.__version__
    assert versions["torch"] == torch.__version__
    assert versions["numpy"] == np.__version__
    assert versions.keys() >= {"python", "gymnasium"}
    described = describe_machine()
    assert described["cores"] == cores()
    assert described["cpu"] == cpu_model() != ""
    assert json.loads(json.dumps([versions, described])) == [versions, described]


def test_packages_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    assert describe_versions().keys() == {"python", "canter", "torch"}


def test_processors_without_a_name_are_identified_by_numbers(monkeypatch):
    text = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
    monkeypatch.setattr(machine.Path, "read_text", lambda path: text)
    assert cpu_model().endswith("(CPU implementer 0x41, CPU part 0xd0c)")


def test_asking_does_not_start_cuda():
    describe_machine()
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
