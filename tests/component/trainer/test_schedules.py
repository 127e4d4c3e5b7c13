"""The course of the learning rate, of policy and critic, against its formula in NumPy, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs the trainer's environment")
import torch
from spmd_process import build_rows
from trainer_parts import write_model

from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings, load_settings
from forage_trainer.engine.policy_worker import PolicyWorker

STEPS, LR, CRITIC_LR = 6, 1e-3, 2e-3


def compute_rates(lr: float, kind: str, warm_up: int, least: float) -> np.ndarray:
    """Rates of steps 0 to STEPS."""
    step = np.arange(STEPS + 1)
    progress = (step - warm_up) / (STEPS - warm_up)
    scale = {
        "constant": np.ones(STEPS + 1),
        "linear": least + (1 - least) * (1 - progress),
        "cosine": least + (1 - least) * (1 + np.cos(np.pi * progress)) / 2,
    }[kind]
    return lr * np.where(step < warm_up, step / max(1, warm_up), np.maximum(scale, least))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("schedule") / "model")


def build_settings(model: Path, *optim: str) -> Settings:
    few = ["trainer.threads=1", f"trainer.total_training_steps={STEPS}", "trainer.algorithm.adv_estimator=gae"]
    few += ["trainer.actor.use_kl_loss=false", f"trainer.actor.optim.lr={LR}", f"trainer.critic.optim.lr={CRITIC_LR}"]
    own = ("lr=", "lr_warmup_steps=")  # the critic's; the rest is the actor's
    critic = [f"trainer.critic.optim.{one}" for one in optim if one.startswith(own)]
    actor = [f"trainer.actor.optim.{one}" for one in optim]
    return load_settings(None, [f"model.path={model}", *few, *actor, *critic], {})


def take_step(worker: PolicyWorker, settings: Settings) -> tuple[float, float]:
    """Rates after a step, so those of the next one; verl reports them so."""
    batch = build_rows(settings)
    result = worker.update(batch, batch.mask, None, None, 2)
    critic = worker.update_critic(batch, worker.values(batch), batch.mask, 2)
    return result.lr, critic["critic/lr"]


def read_rates(worker: PolicyWorker) -> tuple[float, float]:
    """The rates that the next update applies."""
    critic: Any = worker._critic
    return tuple(one.engine.optimizer.param_groups[0]["lr"] for one in (worker._actor, critic.worker))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "warm_up", "least"),
    [("constant", 4, 0.0), ("linear", 0, 0.0), ("linear", 3, 0.2), ("cosine", 3, 0.1)],
)
def test_rates_equal_their_formula_through_a_resume(
    model: Path, tmp_path: Path, kind: str, warm_up: int, least: float
) -> None:
    options = [f"lr_scheduler_type={kind}", f"lr_warmup_steps={warm_up}", f"min_lr_ratio={least}"]
    settings = build_settings(model, *options)
    worker = PolicyWorker(settings)
    expected = [compute_rates(lr, kind, warm_up, least) for lr in (LR, CRITIC_LR)]
    for step in range(STEPS):
        assert read_rates(worker) == pytest.approx([one[step] for one in expected], rel=1e-9, abs=1e-15)
        if step == 3:
            worker.save(tmp_path)
            worker = PolicyWorker(settings)
            worker.load(tmp_path)
            assert read_rates(worker) == pytest.approx([one[step] for one in expected], rel=1e-9, abs=1e-15)
        assert take_step(worker, settings) == pytest.approx([one[step + 1] for one in expected], rel=1e-9, abs=1e-15)


def test_new_settings_hold_from_a_resume_on(model: Path, tmp_path: Path) -> None:
    before = build_settings(model, "lr_scheduler_type=linear", "weight_decay=0.1")
    worker = PolicyWorker(before)
    take_step(worker, before)
    worker.save(tmp_path)
    after = build_settings(model, "lr_scheduler_type=linear", "lr=0.006", "weight_decay=0.2")
    worker = PolicyWorker(after)
    worker.load(tmp_path)
    assert read_rates(worker) == pytest.approx((0.006 * (STEPS - 1) / STEPS,) * 2)
    assert worker._actor.engine.optimizer.param_groups[0]["weight_decay"] == 0.2
    assert all(torch.isfinite(tensor).all() for tensor in worker.weights(torch.float32).values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("min_lr_ratio=0.1", "min_lr_ratio means nothing to lr_scheduler_type constant"),
        ("lr_scheduler_type=cosinus", "cosine"),
    ],
)
def test_a_setting_of_another_course_is_named(given: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(None, [f"trainer.actor.optim.{given}"], {})
