"""A state that n processes wrote is loaded by m, for 1, 2 and 4 processes on CPUs (gloo), and its policy exported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the trainer's environment")
import torch
from random_model import build_random_model
from safetensors.torch import load_file
from trainer_parts import VOCABULARY, save_checkpoint, write_model

from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.checkpoints.export import export_policy
from forage_trainer.weights.shards import read_whole

GAE = "trainer.algorithm.adv_estimator=gae"
KINDS = ("model", "optimizer", "critic/model", "critic/optimizer")
LR = 3e-4
"""Learning rate of the third step of a warm-up over ten steps to 1e-3."""
_RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

Runner = Callable[..., None]


@pytest.fixture
def run_ranks(tmp_path: Path, repository: Path, free_address: Callable[[], str]) -> Runner:
    """Runs `reshard_process` in a number of processes."""
    write_model(tmp_path / "model")
    support = repository / "tests/support"
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(support), environment.get("PYTHONPATH", "")])

    def run(ranks: int, states: list[str], *settings: str) -> None:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1"]
        launch += ["--master-port", free_address().rpartition(":")[2]]
        command = [sys.executable, *launch, str(support / "reshard_process.py"), str(tmp_path / "model")]
        command += [str(tmp_path), ",".join(states), *settings]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert ended.returncode == 0, ended.stderr[-3000:]

    return run


def assert_same_state(result: Path, expected: Path, kinds: tuple[str, ...]) -> None:
    """Weights and moments are equal to the bit."""
    for kind in kinds:
        one, other = read_whole(result / kind), read_whole(expected / kind)
        assert one.keys() == other.keys(), kind
        assert any(tensor.any() for tensor in other.values()), kind
        assert all(torch.equal(one[name], other[name]) for name in other), kind


def assert_same_step(result: Path, expected: Path) -> None:
    """The next step's numbers are equal to 1e-5, and its weights but for gradients that are 0 up to rounding."""
    one, other = (load_file(path.with_suffix(".safetensors")) for path in (result, expected))
    assert one.keys() == other.keys()
    numbers = [name for name in other if not name.startswith("weights.")]
    assert torch.allclose(torch.stack([one[n] for n in numbers]), torch.stack([other[n] for n in numbers]), atol=1e-5)
    # Adam moves a weight by up to its learning rate however small the gradient, so that rounding can decide the sign.
    apart = torch.cat([(one[name] - other[name]).abs().flatten() for name in other if name not in numbers])
    assert apart.max() <= 2 * LR
    assert (apart > 1e-2 * LR).float().mean() < 1e-3


def test_any_number_of_processes_goes_on_with_what_any_other_wrote(run_ranks: Runner, tmp_path: Path) -> None:
    """PPO with a critic, so two models and two optimizers; moments come from two steps, and the warm-up goes on."""
    own = {ranks: tmp_path / f"own_by_{ranks}" for ranks in (1, 2, 4)}
    run_ranks(1, ["-"], GAE)
    run_ranks(2, ["-", str(own[1])], GAE)
    run_ranks(4, ["-", str(own[1]), str(own[2])], GAE)
    run_ranks(2, [str(own[4])], GAE)
    run_ranks(1, [str(own[2]), str(own[4])], GAE)
    for wrote in own:
        assert len(list((own[wrote] / "model").iterdir())) == wrote
        for loaded in own.keys() - {wrote}:
            result = tmp_path / f"own_by_{wrote}_by_{loaded}"
            assert_same_state(result, own[wrote], KINDS)
            assert_same_step(result, own[wrote])


@pytest.mark.parametrize("settings", [(), ("trainer.lora.lora_rank=4", "trainer.lora.lora_alpha=12")])
def test_two_copies_of_two_shards_are_written_once_and_exported(
    run_ranks: Runner, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """`trainer.engine.args.fsdp_size=2` in four processes (HSDP), with all weights trained and with an adapter."""
    run_ranks(1, ["-"], *settings)
    single, copies = tmp_path / "own_by_1", tmp_path / "own_by_1_by_4"
    run_ranks(4, [str(single)], "trainer.engine.args.fsdp_size=2", *settings)
    assert_same_state(copies, single, ("model", "optimizer"))
    assert_same_step(copies, single)
    sizes = [file.stat().st_size for file in (copies / "model").iterdir()]
    whole = sum(tensor.nbytes for tensor in read_whole(single / "model").values())
    assert len(sizes) == 4
    assert whole < sum(sizes) < 1.5 * whole, "headers are large beside such small weights; both copies would be 2"
    result, expected = (export(state, tmp_path / "exported" / state.name) for state in (copies, single))
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_fused_experts_of_four_processes_are_published_and_exported_as_those_of_one(
    run_ranks: Runner, tmp_path: Path
) -> None:
    """Rows of all experts are cut over the processes; what is published has a tensor for each expert."""
    mixtral = build_random_model("mixtral", 7, vocab_size=VOCABULARY, num_local_experts=4)
    mixtral.save_pretrained(tmp_path / "model")
    run_ranks(1, ["-"])
    single, shards = tmp_path / "own_by_1", tmp_path / "own_by_1_by_4"
    run_ranks(4, [str(single)])
    assert_same_state(shards, single, ("model", "optimizer"))
    assert_same_step(shards, single)
    published = load_file(shards.with_suffix(".safetensors"))
    assert "weights.model.layers.1.block_sparse_moe.experts.3.w2.weight" in published
    result, expected = (export(state, tmp_path / "exported" / state.name) for state in (shards, single))
    assert result.keys() == expected.keys() == {name.removeprefix("weights.") for name in published if "." in name}
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def export(state: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Export a state, as that of a checkpoint."""

    def write(target: Path) -> None:
        shutil.copytree(state, target, dirs_exist_ok=True)

    checkpoint = save_checkpoint(Checkpoints(folder, 2, 10), 3, write)
    export_policy(checkpoint, folder / "out", torch.float32, 2**30)
    return load_file(folder / "out/model.safetensors")
