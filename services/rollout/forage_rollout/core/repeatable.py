"""What vLLM needs so that a request's tokens are the same whatever else an engine does.

Sums of floating-point numbers depend on their order, and kernels choose it by the shape of a batch: by how many
sequences run at once, and by how many tokens of a context are still to be computed.
"""

from __future__ import annotations

import os
from typing import Any

from forage_runtime.errors import SettingsError
from forage_runtime.settings import EngineSettings


def prepare_repeatable(cpu: bool, settings: EngineSettings) -> dict[str, Any]:
    """Set vLLM's environment for a repeatable run; returns its arguments.

    Raises:
        SettingsError: a CPU shall sample several sequences at once; its kernels have no other way.
    """
    if not cpu:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    elif settings.max_num_seqs > 1:
        raise SettingsError(
            f"on a CPU run.repeatable needs rollout.engine.max_num_seqs=1, not {settings.max_num_seqs}: "
            "engines sample one sequence at a time"
        )
    return {"enable_prefix_caching": False}
