"""Settings with which a run cannot train: the trainer refuses them when it starts, and the command before that."""

from __future__ import annotations

from forage_runtime.errors import SettingsError
from forage_runtime.settings import AdvantageEstimator, Settings


def check_training(settings: Settings) -> None:
    """Check that settings that are valid each for itself can train together.

    Raises:
        SettingsError: the first that cannot.
    """
    _check_steps(settings)
    _check_batches(settings)
    _check_critic(settings)
    _check_sampling(settings)
    _check_trajectory_length(settings)
    _check_adapters(settings)


def _check_steps(settings: Settings) -> None:
    """Steps that cannot learn are sampled all the same, and publish the same policy to the end."""
    trainer, estimator = settings.trainer, settings.trainer.algorithm.adv_estimator
    if settings.rollout.n < estimator.min_samples:
        raise SettingsError(
            f"rollout.n must be at least {estimator.min_samples}, not {settings.rollout.n}: {estimator} compares the "
            f"samples of a prompt, and learns nothing from fewer; raise it, or set "
            f"trainer.algorithm.adv_estimator={AdvantageEstimator.REINFORCE_PLUS_PLUS}"
        )
    if trainer.critic_warmup >= trainer.total_training_steps:
        raise SettingsError(
            f"trainer.critic_warmup = {trainer.critic_warmup} must be less than trainer.total_training_steps = "
            f"{trainer.total_training_steps}: until then only the critic is trained, and the policy stays as it is"
        )


def _check_batches(settings: Settings) -> None:
    trainer = settings.trainer
    sizes = {"actor": trainer.actor.ppo_mini_batch_size}
    if trainer.algorithm.adv_estimator is AdvantageEstimator.GAE:
        sizes["critic"] = trainer.critic.ppo_mini_batch_size
    for name, size in sizes.items():
        if settings.data.train_batch_size % size:
            raise SettingsError(
                f"trainer.{name}.ppo_mini_batch_size = {size} must divide data.train_batch_size = "
                f"{settings.data.train_batch_size}: choose a divisor"
            )


def _check_critic(settings: Settings) -> None:
    path = settings.trainer.critic.path
    has_critic = settings.trainer.algorithm.adv_estimator is AdvantageEstimator.GAE
    if has_critic and path is not None and not (path / "config.json").is_file():
        raise SettingsError(
            f"trainer.critic.path {path} has no config.json: give the Hugging Face folder of a policy or a value "
            "model, or leave it out"
        )


def _check_sampling(settings: Settings) -> None:
    """The trainer must be able to score what the engine samples: ratios would carry any other difference."""
    rollout = settings.rollout
    # Below 0.01, down to 0.00001, vLLM samples at 0.01 whatever it is asked for; below that it is greedy.
    needed = {"temperature": (rollout.temperature >= 0.01, 1.0), "top_p": (rollout.top_p == 1, 1.0)}
    for name, (is_right, value) in (needed | {"top_k": (rollout.top_k <= 0, -1)}).items():
        if not is_right:
            raise SettingsError(
                f"rollout.{name} = {getattr(rollout, name)} cannot be trained on: the trainer scores a token among "
                f"all tokens, at the temperature at which it was sampled; set rollout.{name}={value}"
            )


def _check_trajectory_length(settings: Settings) -> None:
    """The longest trajectory must fit into a micro-batch, which verl cannot split."""
    rollout = settings.rollout
    longest, (limit, name) = rollout.longest_trajectory, settings.trainer.max_trajectory_length
    models = "the critic takes" if "critic" in name else "the actor and the reference policy take"
    if longest > limit:
        raise SettingsError(
            f"a trajectory may have {longest} tokens (rollout: max_start_length {rollout.max_start_length}, "
            f"{rollout.max_turns + 1} generations of {rollout.max_response_length}, "
            f"{rollout.max_turns} observations of {rollout.max_obs_length}), and {name} = {limit} "
            f"is the most that {models}: raise it to {longest}, or make trajectories shorter"
        )


def _check_adapters(settings: Settings) -> None:
    rank, most = settings.trainer.lora.lora_rank, settings.rollout.engine.max_lora_rank
    if most and not 0 < rank <= most:
        raise SettingsError(
            f"trainer.lora.lora_rank = {rank}, but rollout.engine.max_lora_rank = {most} starts the engine for "
            f"adapters of rank 1 to {most} alone: train one of these, or set rollout.engine.max_lora_rank=0"
        )
