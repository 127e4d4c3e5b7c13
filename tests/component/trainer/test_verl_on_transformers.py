"""What verl, which asks for an older transformers, reads of the installed one is there, or is known not to be.

`docs/development.md` lists what is called of verl.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from arrived_groups import arrive
from trainer_parts import build_trajectory, write_model

from forage_proto.v1.trajectory_pb2 import TrajectoryGroup
from forage_runtime.settings import load_settings
from forage_trainer.algorithms.estimators.grpo import grpo_outcome
from forage_trainer.data.tensors import build_step_tensors, select_trajectories
from forage_trainer.engine.policy_worker import PolicyWorker

REPOSITORY = Path(__file__).parents[3]
GONE_IMPORTS = {
    ("verl.utils.model", "AutoModelForVision2Seq"): "in a try; image models are not trained",
    ("verl.utils.transformers_compat", "AutoModelForVision2Seq"): "in a try; image models are not trained",
    ("verl.models.transformers.monkey_patch", "Qwen2_5_VLFlashAttention2"): "for older versions; image models",
    ("verl.models.transformers.monkey_patch", "Qwen2VLFlashAttention2"): "for older versions; image models",
}
"""(module of verl, name of transformers that it imports) → why that it is gone does not matter."""
MISSING_ATTRIBUTES = {
    ("get_hf_auto_model_class", "auto_map"): "of models with code of their own",
    ("__post_init__", "mtp_num_hidden_layers"): "of models that predict several tokens",
    ("__post_init__", "num_nextn_predict_layers"): "of models that predict several tokens",
    ("__post_init__", "text_config"): "of models of images and text",
    ("_build_module", "_verl_strip_modules"): "verl's own",
}
"""(function of verl, attribute of a model or a configuration that it looks for in vain) → why that is right."""


def find_imports(module: str, file: Path) -> Iterator[tuple[str, str]]:
    """What a module takes from transformers by name: (place, name)."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "transformers":
            assert node.module is not None
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "transformers":
            yield "transformers", node.attr


def has_name(place: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(place), name):
            return True
        importlib.import_module(f"{place}.{name}")
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def missed(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """(function of verl, attribute) of every look in vain at a model or its configuration, while an actor and a critic
    are built, score, learn, and are saved and loaded."""
    found: set[tuple[str, str]] = set()

    def note(name: str) -> None:
        code = sys._getframe(2).f_code
        if "/site-packages/verl/" in code.co_filename:
            found.add((code.co_name, name))

    look_in_module = torch.nn.Module.__getattr__
    look_in_config = transformers.PreTrainedConfig.__getattribute__

    def read_module(self: torch.nn.Module, name: str) -> object:
        try:
            return look_in_module(self, name)
        except AttributeError:
            note(name)
            raise

    def read_config(self: transformers.PreTrainedConfig, name: str) -> object:
        try:
            return look_in_config(self, name)
        except AttributeError:
            note(name)
            raise

    folder = tmp_path_factory.mktemp("verl")
    model = write_model(folder / "model")
    short = ["trainer.threads=1", "trainer.actor.ppo_max_token_len_per_gpu=120", "trainer.actor.kl_loss_coef=0.05"]
    ppo = ["trainer.algorithm.adv_estimator=gae", "trainer.actor.ppo_max_token_len_per_gpu=120"]
    settings = load_settings(None, [f"model.path={model}", *short, *ppo], {})
    rows = [build_trajectory("a", i, float(i % 2), turns=(3, 4), observation=2) for i in range(4)]
    groups = [arrive(TrajectoryGroup(group_uid="a", trajectories=rows))]
    batch = build_step_tensors(
        select_trajectories(groups, settings.trainer.algorithm), 0, 1, 0, settings.trainer.algorithm
    )
    assert batch is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "__getattr__", read_module)
        patch.setattr(transformers.PreTrainedConfig, "__getattribute__", read_config)
        worker = PolicyWorker(settings)
        advantages = grpo_outcome(batch.token_rewards, batch.mask, batch.uids)
        worker.update(batch, advantages, worker.reference_log_probs(batch), worker.log_probs(batch), 1)
        worker.update_critic(batch, worker.values(batch), advantages, 1)
        worker.weights(torch.float32)
        worker.save(folder / "state")
        worker.load(folder / "state")
    return found


def test_verl_misses_nothing_of_a_model_that_is_not_known(missed: set[tuple[str, str]]) -> None:
    assert missed == MISSING_ATTRIBUTES.keys()


def test_verl_imports_nothing_that_transformers_no_longer_has(missed: set[tuple[str, str]]) -> None:
    loaded = {
        name: Path(module.__file__)
        for name, module in sorted(sys.modules.items())
        if name.split(".")[0] == "verl" and (getattr(module, "__file__", None) or "").endswith(".py")
    }
    wanted = {(module, place, name) for module, file in loaded.items() for place, name in find_imports(module, file)}
    assert len(wanted) > 50
    gone = {(module, name) for module, place, name in wanted if not has_name(place, name)}
    assert gone == GONE_IMPORTS.keys()


def test_the_page_lists_what_is_called_of_verl() -> None:
    page = (REPOSITORY / "docs/development.md").read_text(encoding="utf-8")
    section = page.partition("## verl beside a newer transformers")[2].partition("\n## ")[0]
    called = set()
    for file in (REPOSITORY / "services/trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
                called |= {alias.name for alias in node.names}
    assert {name for name in called if f"`{name}`" not in section} == set()
