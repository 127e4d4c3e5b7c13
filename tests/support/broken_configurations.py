"""Broken configurations, by who names the problem, with the beginning or a part of the one line that names it.

They are overrides of configs/demo.yaml; {own} is a file with a function of one's own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from forage_runtime.problems import Check, find_problems
from forage_runtime.settings import Settings, load_settings

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))
LARGE_CONTEXT = 32_768
GAE = "trainer.algorithm.adv_estimator=gae"

BROKEN = {
    "settings": {
        "trainer.max_stalenes=1": "unknown setting 'trainer.max_stalenes': did you mean 'trainer.max_staleness'?",
        "rollout.temperature=-1": "setting 'rollout.temperature' is -1",
        "rollout.top_p=0": "setting 'rollout.top_p' is 0",
        "data.train_batch_size=none": "setting 'data.train_batch_size' is 'none'",
        "trainer.logger=[weights]": "setting 'trainer.logger.0' is 'weights'",
        "retriever.http_address=nowhere": "setting 'retriever.http_address' is 'nowhere'",
        "redis.url=http://x": "setting 'redis.url' may hold a password",
        "rollout.engine_replicas.min=3": "max 1 is below min 3",
        "trainer.nnodes=2": "nnodes=2 needs a Ray cluster",
        "tls.cert=/no/cert": "setting 'tls': cert is given without key",
        "reward.shadow.x=no_such_route": "shadow.x is 'no_such_route': expected another entry of reward.routes",
        "reward.shadow.world_facts=world_facts": "shadow.world_facts is 'world_facts': expected another entry",
        "reward.user.mine.function=mine.py": "reward.user.mine.function' is 'mine.py': expected FILE.py:FUNCTION",
        "reward.routes.x.params.a=1": "setting 'reward.routes.x.0.name': Field required",
        "trainer.actor.policy_loss.loss_mode=dro": "loss_mode dro needs args.dro_beta",
    },
    "files": {
        "model.path=/no/model": "model.path /no/model does not exist",
        "data.corpus=/no/corpus.jsonl": "corpus /no/corpus.jsonl",
        "data.corpus={own}": "own.py:1 is not JSON",
        "data.train_files=[/no/train.parquet]": "data file /no/train.parquet does not exist",
        "data.val_files=[{own}]": "own.py cannot be read as Parquet",
        'reward.routes={"other":{"name":"em"}} data.val_files={train}': "data source 'world_facts' of",
        "data.train_batch_size=80000": "usable questions, fewer than data.train_batch_size = 80000",
        "rollout.n=1": "rollout.n must be at least 2, not 1: grpo compares",
        "rollout.n=1 trainer.algorithm.adv_estimator=rloo": "rollout.n must be at least 2, not 1: rloo compares",
        "rollout.top_k=50": "rollout.top_k = 50 cannot be trained on",
        "trainer.actor.ppo_mini_batch_size=3": "trainer.actor.ppo_mini_batch_size = 3 must divide",
        "trainer.actor.ppo_max_token_len_per_gpu=100": "trainer.actor.ppo_max_token_len_per_gpu = 100",
        "rollout.engine.max_lora_rank=8": "trainer.lora.lora_rank = 0, but rollout.engine.max_lora_rank = 8",
        f"{GAE} trainer.critic.path=/no/critic": "trainer.critic.path /no/critic",
        f"{GAE} trainer.critic_warmup=9999": "critic_warmup = 9999 must be",
        "rollout.engine.endpoint=http://host:1/v1": "a remote model cannot be trained",
        "redis.password_file=/no/word": "redis.password_file /no/word cannot be read",
    },
    "reward": {
        "reward.auth_token_file=/no/token": "reward.auth_token_file /no/token cannot be read",
        "reward.user.mine.function=/no/such.py:score": "reward.user.mine: '/no/such.py' is not a Python file",
        "reward.user.mine.function={own}:none": "own.py has no 'none': define it",
        "reward.user.em.function={own}:score": "reward.user.em has the name of a built-in reward",
        "reward.routes.x.name=no_such_reward": "reward.routes.x asks for the reward 'no_such_reward'",
        "reward.routes.x.name=em reward.routes.x.params.a=1": "reward.routes.x.params.a does not exist",
    },
    "retriever": {
        "tls.ca=/no/ca tls.cert=/no/cert tls.key=/no/key": "tls.cert /no/cert cannot be read",
        "retriever.auth_token_file=/no/token": "retriever.auth_token_file /no/token cannot be read",
        "retriever.index=/no/index": "retriever.index: /no/index is not an index",
        "retriever.mode=dense retriever.encoder.model=/no/encoder": "retriever.encoder.model: model /no/encoder lacks",
        "retriever.mode=dense retriever.encoder.convention=none": "retriever.encoder.convention is 'none'",
        "retriever.mode=dense retriever.faiss_factory=Nonsense": "retriever.faiss_factory 'Nonsense'",
        "retriever.rerank.model=/no/reranker": "retriever.rerank.model: model /no/reranker lacks config.json",
        "retriever.device=gpu": "retriever.device is gpu",
    },
    "rollout": {
        "rollout.auth_token_file=/no/token": "rollout.auth_token_file /no/token cannot be read",
        "rollout.max_prompt_length=100000": "rollout.max_prompt_length = 100000 and rollout.max_response_length",
        "rollout.engine.max_model_len=4096": "rollout.engine.max_model_len = 4096 is more than the 1024 tokens of",
        "rollout.max_response_length=512": "rollout.max_response_length 512 leaves no room",
        "rollout.max_obs_length=1": "rollout.max_obs_length 1 is less than an empty observation",
        "rollout.max_start_length=500": "rollout.max_start_length = 500 is more than rollout.max_prompt_length",
        "rollout.environments.x.name=nonsense": "rollout.environments.x (nonsense)",
        "rollout.environments.x.name=/no/such.py:A": "rollout.environments.x (/no/such.py:A)",
        "rollout.device=gpu": "rollout.device is gpu",
        "security.verify_key_file=/no/key": "security.verify_key_file /no/key",
    },
    "trainer": {
        "trainer.logger=[wandb]": "trainer.logger names wandb, which is not installed",
        "trainer.device=gpu": "trainer.device is gpu",
        "data.sampler={own}:none": "data.sampler = ",
        "trainer.algorithm.estimator=/no/own.py:f": "trainer.algorithm.estimator = ",
        "security.signing_key_file=/no/key": "security.signing_key_file /no/key",
        "trainer.upload_url=nonsense://x/y": "trainer.upload_url",
        "trainer.engine.args.nope=1": "trainer.engine.args.nope is no field",
        "trainer.engine.param_dtype=bf16": "trainer.engine.param_dtype=bf16 needs a GPU",
    },
}


each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)


def each_mistake(part: str) -> pytest.MarkDecorator:
    """Run a test for each mistake of a part of `BROKEN`."""
    return pytest.mark.parametrize(("overrides", "sentence"), BROKEN[part].items())


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name their files from the checkout's folder."""
    monkeypatch.chdir(REPOSITORY)


def load(overrides: str, folder: Path, *more: str) -> Settings:
    """The settings of the demo with a mistake."""
    own = folder / "own.py"
    own.write_text("def score(view, truth, params):\n    return 1.0\n")
    given = [one.replace("{own}", str(own)) for one in overrides.split()]
    return load_settings(REPOSITORY / "configs/demo.yaml", [*more, *given], {})


def assert_named(problems: list[str], sentence: str) -> None:
    """Assert that there is one problem, and that its line names it."""
    assert len(problems) == 1, problems
    assert sentence in problems[0]


def check_recipe(recipe: Path, list_checks: Callable[[Settings], Iterable[Check]], *overrides: str) -> list[str]:
    """The problems of a recipe whose model is here: the tiny policy with the context of a large one."""
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        shutil.copytree(REPOSITORY / "models/tiny-policy", model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LARGE_CONTEXT}))
        return find_problems(list_checks(load_settings(recipe, [f"model.path={model}", *overrides], {})))
