"""`trainer.device`: GPUs are hidden where it says cpu, and a torch for GPUs without one is refused at once."""

from __future__ import annotations

import pytest

from forage_runtime.errors import UserError
from forage_runtime.settings import load_settings
from forage_trainer import __main__ as program
from forage_trainer import device
from forage_trainer.__main__ import main


def test_a_torch_for_cpus_is_not_asked_for_gpus() -> None:
    with pytest.raises(UserError, match=r"trainer.device is gpu, and the installed PyTorch was built for CPUs"):
        main(load_settings(None, ["trainer.device=gpu"], {}))


@pytest.mark.parametrize("overrides", [[], ["trainer.device=gpu"]])
def test_a_torch_for_gpus_on_a_machine_without_one_is_refused_with_the_remedy(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("forage_runtime.devices.find_cuda_version", lambda *_: "13.0")
    monkeypatch.setattr(device, "find_cuda_version", lambda: "13.0")
    assert program.prepare_device(load_settings(None, overrides, {}).trainer)
    with pytest.raises(UserError, match=r"CUDA 13.0, .* shows no GPU that it can use: .*trainer.device=cpu"):
        main(load_settings(None, overrides, {}))


def test_fewer_gpus_than_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    device.check_gpus(4, 4)
    with pytest.raises(
        UserError, match=r"starts 4 processes .* shows 2 \(CUDA_VISIBLE_DEVICES='4,5'\): .*n_gpus_per_node"
    ):
        device.check_gpus(2, 4)
