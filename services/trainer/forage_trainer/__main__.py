"""`python -m forage_trainer [--config FILE] [key.key=value …]`: train, then exit 0.

Under `python -m torch.distributed.run --nproc-per-node N -m forage_trainer …` N processes share the work; the first of
them alone talks to Redis and writes files.

Exit codes: 2 with one sentence where the input or the machine is at fault or a guard stopped the run, 3 when a guard
rolled it back (the next start goes on), 143 when stopped by SIGTERM, 1 otherwise.
"""

from __future__ import annotations

import os
import signal
import sys

# Before torch is loaded: OpenMP threads that spin while they wait starve whatever shares the cores, themselves
# included (two threads beside two busy processes: an update of 5 s takes 20 s and more).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from forage_common import service
from forage_common.errors import FencedError, UserError
from forage_common.model_folder import check_model_folder
from forage_common.questions import Questions, read_questions
from forage_common.settings import AdvantageEstimator, Settings
from forage_common.streams import StreamClient
from forage_common.telemetry import Health, get_logger, serve_health
from forage_trainer.batcher import BatchTimeoutError
from forage_trainer.chat_tokenizer import ChatTokenizer
from forage_trainer.dataset import batches, report
from forage_trainer.rollbacks import RolledBackError
from forage_trainer.waiting import PATIENCE_S, Stop, Stopped

EXIT_ROLLED_BACK, EXIT_STOPPED = 3, 143


def check_settings(settings: Settings) -> None:
    """
    Raises:
        UserError: settings that contradict each other.
    """
    estimator = settings.trainer.algorithm.adv_estimator
    if settings.rollout.n < estimator.least_samples:
        raise UserError(f"rollout.n must be at least 2: {estimator} compares the samples of a prompt")
    if settings.data.train_batch_size % settings.trainer.actor.ppo_mini_batch_size:
        raise UserError(
            f"trainer.actor.ppo_mini_batch_size = {settings.trainer.actor.ppo_mini_batch_size} must divide "
            f"data.train_batch_size = {settings.data.train_batch_size}"
        )
    if estimator is AdvantageEstimator.GAE:
        _check_critic(settings)


def _check_critic(settings: Settings) -> None:
    critic = settings.trainer.critic
    if settings.data.train_batch_size % critic.ppo_mini_batch_size:
        raise UserError(
            f"trainer.critic.ppo_mini_batch_size = {critic.ppo_mini_batch_size} must divide "
            f"data.train_batch_size = {settings.data.train_batch_size}"
        )
    if critic.path is not None and not (critic.path / "config.json").is_file():
        raise UserError(
            f"trainer.critic.path {critic.path} has no config.json: give the Hugging Face folder of a policy or a "
            "value model, or leave it out"
        )


def main(settings: Settings) -> None:
    """Everything that can be wrong with the input is found before the engine is built."""
    if int(os.environ.get("RANK", "0")) > 0:
        _follow(settings)
        return
    stop, health = Stop(), Health()
    stop.on_signals()
    check_settings(settings)
    check_model_folder(settings.model.path)
    server = serve_health(settings.trainer.health_address, health)
    try:
        health.wait_for("start", "reading the questions")
        train = read_questions(settings.data.train_paths)
        validation = read_questions(settings.data.val_files)
        batches(train.rows, settings)
        tokenizer = ChatTokenizer(settings.model.path)
        longest = settings.rollout.max_start_length
        train = train.fitting(tokenizer, longest)
        validation = validation.fitting(tokenizer, longest, settings.data.val_max_samples)
        batches(train.rows, settings)
        report("train", train)
        report("validation", validation)
        _train(settings, train, validation, tokenizer.pad_id, stop, health)
    except Stopped:
        get_logger().info("stopped")
        sys.exit(EXIT_STOPPED)
    except RolledBackError as error:
        get_logger().error("rolled_back", reason=str(error))
        sys.exit(EXIT_ROLLED_BACK)
    except (FencedError, BatchTimeoutError) as error:
        get_logger().error("trainer_gave_up", reason=str(error))
        sys.exit(1)
    finally:
        server.shutdown()


def _train(
    settings: Settings, train: Questions, validation: Questions, pad_id: int, stop: Stop, health: Health
) -> None:
    from forage_trainer.loop import Loop
    from forage_trainer.policy_worker import PolicyWorker

    health.wait_for("start", "building the engine")
    worker = PolicyWorker(settings)
    streams = StreamClient(settings.redis, settings.run.id, PATIENCE_S)
    try:
        Loop(settings, streams, worker, train, validation, pad_id, stop, health).run()
    finally:
        worker.close()


def _follow(settings: Settings) -> None:
    """What every process but the first does."""
    from forage_trainer.policy_worker import PolicyWorker
    from forage_trainer.spmd import follow

    worker = PolicyWorker(settings)
    # The launcher signals all processes; the first decides when a step may end, and its own end ends this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follow(worker)


if __name__ == "__main__":
    service.run("trainer", main)
