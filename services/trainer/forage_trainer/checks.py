"""The checks of the trainer before it starts: before a model is built, which takes minutes where it is large."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from forage_records.training import list_training_checks
from forage_runtime.devices import resolve_device
from forage_runtime.files.model_folder import check_model_folder
from forage_runtime.problems import Check, find_problems, list_common_checks, run_checks
from forage_runtime.security.signatures import RunSignatures
from forage_runtime.settings import Settings, TrainingEngineSettings
from forage_trainer.checkpoints.upload import open_upload
from forage_trainer.data.splits import read_splits
from forage_trainer.extensions import check_functions
from forage_trainer.reporting.tracking import require_backend
from forage_trainer.weights.completeness import check_complete
from forage_weights.trainer.publisher import find_policies_place


def list_checks(settings: Settings) -> Iterator[Check]:
    """List the checks of the settings and of the files that they name, but for the questions."""
    trainer, folder = settings.trainer, settings.model.path
    probes = trainer.probe.freq or trainer.algorithm.probe_penalty.coef
    yield from list_common_checks(settings, "trainer", "reward", *(["rollout"] if probes else []))
    yield from list_training_checks(settings)
    yield partial(check_functions, settings)
    yield lambda: RunSignatures(settings.security, settings.run.id).require_signer("the trainer")
    yield partial(check_model_folder, folder)
    yield partial(check_complete, folder)
    yield partial(find_policies_place, trainer.publish.uri)
    if trainer.upload_url:
        yield partial(open_upload, trainer.upload_url)
    yield from (partial(require_backend, backend) for backend in trainer.logger)
    yield partial(resolve_device, trainer.device, "trainer.device")
    if trainer.engine != TrainingEngineSettings():
        yield from _list_engine_checks(settings)


def _list_engine_checks(settings: Settings) -> Iterator[Check]:
    from forage_trainer.engine.engine_config import check_engine_args, resolve_engine  # verl's take seconds to import

    engine = settings.trainer.engine
    yield lambda: resolve_engine(engine, resolve_device(settings.trainer.device, "trainer.device"))
    yield partial(check_engine_args, engine.args)


def list_remarks(settings: Settings) -> Iterator[str]:
    """What of the questions under the model's chat template matters to a run, after reading them as a start does.

    Raises:
        DataError: as `read_splits`.
    """
    if not find_problems([partial(check_model_folder, settings.model.path), partial(check_functions, settings)]):
        for fact in read_splits(settings).tokenizer.facts:
            yield f"{fact.level}: chat template: {fact.describe()}"


if __name__ == "__main__":
    run_checks(list_checks, list_remarks)
