"""Two trainer processes compute what one computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import spmd_process
import torch
from random_model import write_value_model
from safetensors.torch import load_file
from trainer_parts import write_model

LAUNCH = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port"]


@pytest.mark.parametrize(
    "way",
    [[], [spmd_process.SHARED], ["trainer.engine.use_remove_padding=true", "trainer.engine.use_fused_kernels=true"]],
)
def test_a_step_of_two_processes_equals_that_of_one(
    tmp_path: Path, free_address: Callable[[], str], repository: Path, way: list[str]
) -> None:
    """Groups of four and three rows, so that one process lacks a row; every gradient, metric and weight.

    The two pack rows and never see all logits, or neither, as one does; or each shared token is computed once.
    """
    model, (one, two) = write_model(tmp_path / "model"), (tmp_path / f"{n}.safetensors" for n in ("one", "two"))
    port = free_address().rpartition(":")[2]
    command = [sys.executable, *LAUNCH, port, str(repository / "tests/support/spmd_process.py"), str(model), str(two)]
    # A head that is not 0 gives the body of the critic gradients; rates are too low for Adam's steps, of which rounding
    # decides the sign where a gradient is 0, to be seen in what follows.
    critic = f"trainer.critic.path={write_value_model(tmp_path / 'critic', model)}"
    command += [*way, critic]
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    path = {"PYTHONPATH": os.pathsep.join([str(repository / "tests/support"), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, env=os.environ | quiet | path, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    spmd_process.main(model, one, critic, *(one for one in way if one == spmd_process.SHARED))
    expected, result = load_file(one), load_file(two)
    assert result.keys() == expected.keys()
    assert sum(bool(tensor.any()) for tensor in expected.values()) > 0.9 * len(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(result[name], tensor, atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    for results in (expected, result):
        assert all(torch.equal(results[n], results[n.replace("again", "second")]) for n in results if "again" in n)
        assert torch.equal(results["log_probs_then"], results["log_probs"])
