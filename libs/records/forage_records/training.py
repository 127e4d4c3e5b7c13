"""Settings with which a run cannot train: the trainer refuses them when it starts, and the command before that."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from forage_runtime.errors import SettingsError
from forage_runtime.problems import Check
from forage_runtime.settings import AdvantageEstimator, Settings


def list_training_checks(settings: Settings) -> Iterator[Check]:
    """List the checks that settings which are valid each for itself can train together; any machine can make them."""
    yield partial(_check_trainable, settings)
    yield partial(_check_samples, settings)
    yield partial(_check_warmup, settings)
    yield partial(_check_batches, settings)
    if settings.trainer.algorithm.adv_estimator is AdvantageEstimator.GAE:
        yield partial(_check_critic, settings)
    # Below 0.01, down to 0.00001, vLLM samples at 0.01 whatever it is asked for; below that it is greedy.
    rollout = settings.rollout
    yield partial(_check_sampling, "temperature", rollout.temperature, 1.0, rollout.temperature >= 0.01)
    yield partial(_check_sampling, "top_p", rollout.top_p, 1.0, rollout.top_p == 1)
    yield partial(_check_sampling, "top_k", rollout.top_k, -1, rollout.top_k <= 0)
    yield partial(_check_trajectory_length, settings)
    yield partial(_check_adapters, settings)


def _check_trainable(settings: Settings) -> None:
    if endpoint := settings.rollout.engine.endpoint:
        raise SettingsError(f"rollout.engine.endpoint is {endpoint}: a remote model cannot be trained; unset it")


def _check_samples(settings: Settings) -> None:
    """Steps that cannot learn are sampled all the same, and publish the same policy to the end."""
    estimator = settings.trainer.algorithm.adv_estimator
    if settings.rollout.n < estimator.min_samples:
        raise SettingsError(
            f"rollout.n must be at least {estimator.min_samples}, not {settings.rollout.n}: {estimator} compares the "
            f"samples of a prompt, and learns nothing from fewer; raise it, or set "
            f"trainer.algorithm.adv_estimator={AdvantageEstimator.REINFORCE_PLUS_PLUS}"
        )


def _check_warmup(settings: Settings) -> None:
    trainer = settings.trainer
    if trainer.critic_warmup >= trainer.total_training_steps:
        raise SettingsError(
            f"trainer.critic_warmup = {trainer.critic_warmup} must be less than trainer.total_training_steps = "
            f"{trainer.total_training_steps}: until then only the critic is trained, and the policy stays as it is"
        )


def _check_batches(settings: Settings) -> None:
    size, batch = settings.trainer.actor.ppo_mini_batch_size, settings.data.train_batch_size
    if batch % size:
        raise SettingsError(
            f"trainer.actor.ppo_mini_batch_size = {size} must divide data.train_batch_size = {batch}: choose a divisor"
        )


def _check_critic(settings: Settings) -> None:
    path = settings.trainer.critic.path
    if path is not None and not (path / "config.json").is_file():
        raise SettingsError(
            f"trainer.critic.path {path} has no config.json: give the Hugging Face folder of a policy or a value "
            "model, or leave it out"
        )


def _check_sampling(name: str, given: float, needed: float, is_right: bool) -> None:
    """The trainer must be able to score what the engine samples: ratios would carry any other difference."""
    if not is_right:
        raise SettingsError(
            f"rollout.{name} = {given} cannot be trained on: the trainer scores a token among all tokens, at the "
            f"temperature at which it was sampled; set rollout.{name}={needed}"
        )


def _check_trajectory_length(settings: Settings) -> None:
    """The longest trajectory must fit into a micro-batch, which verl cannot split."""
    rollout = settings.rollout
    longest, limit = rollout.longest_trajectory, settings.trainer.actor.ppo_max_token_len_per_gpu
    if longest > limit:
        raise SettingsError(
            f"a trajectory may have {longest} tokens (rollout: max_start_length {rollout.max_start_length}, "
            f"{rollout.max_turns + 1} generations of {rollout.max_response_length}, "
            f"{rollout.max_turns} observations of {rollout.max_obs_length}), and "
            f"trainer.actor.ppo_max_token_len_per_gpu = {limit} is the most that a micro-batch takes: "
            f"raise it to {longest}, or make trajectories shorter"
        )


def _check_adapters(settings: Settings) -> None:
    rank, most = settings.trainer.lora.lora_rank, settings.rollout.engine.max_lora_rank
    if most and not 0 < rank <= most:
        raise SettingsError(
            f"trainer.lora.lora_rank = {rank}, but rollout.engine.max_lora_rank = {most} starts the engine for "
            f"adapters of rank 1 to {most} alone: train one of these, or set rollout.engine.max_lora_rank=0"
        )
