"""Texts of trajectories where they are shown or judged: the rollout service leaves out those that tokens imply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from forage_proto.v1.trajectory_pb2 import Trajectory
from forage_runtime.errors import DataError
from forage_runtime.telemetry.logs import get_logger
from forage_trajectory.codec import restore_texts


class TextReader:
    """Puts texts back with the policy's tokenizer, which is read when it is needed first."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: of the policy's model.
        """
        self._folder = folder

    def restore(self, trajectories: Iterable[Trajectory]) -> None:
        """Put back the texts of each; one whose tokens decode to another text than the agent's stays as it is."""
        for trajectory in trajectories:
            try:
                restore_texts(trajectory, self._decode)
            except DataError as error:
                get_logger().warning("texts_not_restored", trajectory=trajectory.id, detail=str(error))

    def decode(self, texts: Sequence[npt.NDArray[np.int32]]) -> list[str]:
        """Decode the tokens of several texts, control tokens included.

        Raises:
            DataError: there is no tokenizer, or a token is none of its own.
        """
        ids = [one.tolist() for one in texts]
        try:
            return cast(list[str], self._tokenizer.decode_batch(ids, skip_special_tokens=False))
        except OverflowError as error:
            raise DataError(f"tokens cannot be decoded: {error}") from None

    def _decode(self, token_ids: Sequence[int]) -> str:
        return cast(str, self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        file = self._folder / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception on any malformed file
            raise DataError(f"{file} is not a tokenizer ({error}): give a complete Hugging Face folder") from None
