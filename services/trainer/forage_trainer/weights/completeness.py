"""Whether a model folder has every tensor of its model, as transformers finds them, before anything is built.

transformers gives a tensor that is missing random values with a report on the terminal, and vLLM 0.32 loads a linear
layer without its weight in silence: trainer and engine would begin from two different policies.
"""

from __future__ import annotations

from pathlib import Path

from forage_runtime.errors import DataError
from forage_runtime.files.model_folder import read_model_shapes

_NAMED = 5


def find_incomplete(folder: Path) -> str:
    """Describe the tensors that are missing or have another shape; empty: none, or a model that is not known here.

    Only the headers of the files are read: model and tensors have no memory.
    """
    import torch
    from transformers import AutoConfig, logging

    from forage_trainer.weights.checkpoint_tensors import build_skeleton

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report would come before ours
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        _, found = type(build_skeleton(config, "", None)).from_pretrained(
            None,
            config=config,
            state_dict={name: torch.empty(shape, device="meta") for name, shape in read_model_shapes(folder).items()},
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )
    except Exception:  # noqa: BLE001 - whatever this means, building the model says it, and better
        return ""
    finally:
        logging.set_verbosity(verbosity)
    missing = sorted(found.get("missing_keys", ()))
    shapes = sorted(str(one[0] if isinstance(one, tuple) else one) for one in found.get("mismatched_keys", ()))
    parts = [
        f"{len(names)} tensors {problem} ({', '.join(names[:_NAMED])}{', …' if len(names) > _NAMED else ''})"
        for names, problem in ((missing, "are missing"), (shapes, "have another shape than the model"))
        if names
    ]
    return " and ".join(parts)


def check_complete(folder: Path) -> None:
    """
    Raises:
        DataError: tensors are missing, or have another shape.
    """
    if problem := find_incomplete(folder):
        raise DataError(
            f"model.path {folder} is not the whole model: {problem}, and would begin as random numbers: "
            "give a complete Hugging Face folder"
        )
