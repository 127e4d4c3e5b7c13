"""Micro-batches as a model takes them, and the tokens of them that matter.

Rows are padded on the right, or packed: end to end in one row of the model's batch. Or they are a tree, in which each
prefix that rows share is once. Places are positions of tokens among packed rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch.nn.functional import pad

from forage_trainer.data.prefix_tree import Ids, PrefixTree, build_tree
from forage_trainer.data.tensors import pad_jagged, split_rows
from forage_trainer.engine.attention import PREFIX_TREE, TreeAttention, build_row_arguments


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a micro-batch are.

    packed: whether the model sees packed rows.
    prompts, responses: number of tokens of each row, (rows,).
    offsets: place of each row's first token, and the number of tokens, (rows + 1,).
    rows, columns: of each token that predicts a response token, (response tokens,).
    """

    packed: bool
    prompts: torch.Tensor
    responses: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, micro: TensorDict | Mapping[str, torch.Tensor], packed: bool) -> Layout:
        """Describe a micro-batch by its jagged `prompts` and `responses`."""
        prompts, responses = (micro[name].offsets().diff() for name in ("prompts", "responses"))
        rows = torch.arange(len(prompts), device=prompts.device).repeat_interleave(responses)
        begins = responses.cumsum(0) - responses
        columns = prompts[rows] - 1 + torch.arange(len(rows), device=prompts.device) - begins[rows]
        return cls(packed, prompts, responses, pad((prompts + responses).cumsum(0), (1, 0)), rows, columns)

    @property
    def places(self) -> torch.Tensor:
        """Place of each token that predicts a response token."""
        return self.offsets[self.rows] + self.columns

    def arrange(self, values: torch.Tensor) -> torch.Tensor:
        """Arrange jagged values, or (rows, columns) of any width, as the model takes them."""
        if values.is_nested:
            return values.values().unsqueeze(0) if self.packed else pad_jagged(values)
        return self.pack(values).unsqueeze(0) if self.packed else values

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Pack (rows, columns); the result is flat."""
        columns = torch.arange(values.shape[1], device=values.device)
        return values[columns < (self.prompts + self.responses).unsqueeze(1)]

    def build_inputs(self, ids: torch.Tensor) -> dict[str, Any]:
        """Build the model's inputs.

        Under a causal mask no token attends to padding on its right, so none is masked.
        """
        arranged = self.arrange(ids)
        positions = torch.arange(arranged.shape[1], device=arranged.device)
        if not self.packed:
            return {"input_ids": arranged, "position_ids": positions.expand_as(arranged), "attention_mask": None}
        positions = positions - self.offsets[:-1].repeat_interleave(self.offsets.diff())
        inputs = {"input_ids": arranged, "position_ids": positions.unsqueeze(0), "attention_mask": None}
        return inputs | build_row_arguments(self.offsets)

    def choose(self) -> tuple[torch.Tensor | int, torch.Tensor | None]:
        """Choose the logits to keep: Transformers' `logits_to_keep`, and the index of each token among these.

        The index is None where exactly the tokens that predict a response token are kept, in order.
        """
        if self.packed:
            return self.places, None
        # Columns are kept for all rows alike, from the first that any row needs.
        first, width = int(self.prompts.min()) - 1, int(self.offsets.diff().max())
        kept = width - first
        return kept, self.rows * kept + self.columns - first

    def ask(self, values: torch.Tensor) -> torch.Tensor:
        """Select of values of the tokens that predict a response token those that the output layer computes."""
        return values

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Put what the output layer computed at the places of the tokens that predict a response token, 0 elsewhere."""
        return self.finish(values.new_zeros(int(self.offsets[-1])).index_copy(0, self.places, values))

    def collect(self, values: torch.Tensor) -> torch.Tensor:
        """Collect values of the model's batch, (rows, columns), as those of packed rows, flat."""
        return values.squeeze(0) if self.packed else self.pack(values)

    def finish(self, values: torch.Tensor) -> torch.Tensor:
        """Give packed values the layout of verl's model output.

        That is flat where a loss follows, since a backward pass through a jagged tensor is slow, else jagged.
        """
        if torch.is_grad_enabled():
            return values
        lengths = self.offsets.diff()
        bounds: dict[str, Any] = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
        return torch.nested.nested_tensor_from_jagged(values, self.offsets, **bounds)


@dataclass(frozen=True)
class TreeLayout(Layout):
    """Rows as a tree: the model sees one row with the tokens of the tree.

    asked: of the tokens that predict a response token, the first of those that are equal: in their own row's tokens up
        to the predicted one, and in the temperature.
    answers: for each token that predicts a response token, which of the asked ones it equals, (response tokens,).
    """

    tree: PrefixTree
    asked: torch.Tensor
    answers: torch.Tensor

    @classmethod
    def of_tree(cls, micro: TensorDict | Mapping[str, torch.Tensor]) -> TreeLayout:
        """Describe a micro-batch by its jagged `prompts` and `responses`, and its `temperature` where rows differ."""
        layout = Layout.of(micro, packed=True)
        tree = build_tree(join_rows(micro))
        places = torch.from_numpy(tree.places)[layout.places]
        questions = [places, micro["responses"].values()]
        temperature = micro.get("temperature")
        if isinstance(temperature, torch.Tensor):
            questions.append(temperature.unique(return_inverse=True)[1][layout.rows])
        questions, answers = torch.stack(questions).unique(dim=1, return_inverse=True)
        asked = torch.full((questions.shape[1],), len(answers)).scatter_reduce(
            0, answers, torch.arange(len(answers)), "amin"
        )
        return cls(**vars(layout), tree=tree, asked=asked, answers=answers)

    def build_inputs(self, ids: torch.Tensor) -> dict[str, Any]:
        """Build the model's inputs; positions are those of rows."""
        packed = ids.values() if ids.is_nested else self.pack(ids)
        firsts = torch.from_numpy(self.tree.firsts)
        begins = self.offsets[:-1].repeat_interleave(self.offsets.diff())
        return {
            "input_ids": packed[firsts].unsqueeze(0),
            "position_ids": (firsts - begins[firsts]).unsqueeze(0),
            "attention_mask": None,
            PREFIX_TREE: TreeAttention(self.tree),
        }

    def choose(self) -> tuple[torch.Tensor | int, torch.Tensor | None]:
        return self.ask(torch.from_numpy(self.tree.places)[self.places]), None

    def ask(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.asked]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Put what the output layer computed at each place that it holds for; the gradient is the sum of theirs."""
        return super().spread(values.index_select(0, self.answers))

    def collect(self, values: torch.Tensor) -> torch.Tensor:
        return values.squeeze(0).index_select(0, torch.from_numpy(self.tree.places))


def join_rows(micro: TensorDict | Mapping[str, torch.Tensor]) -> list[Ids]:
    """Join the jagged `prompts` and `responses` to the token ids of each row."""
    parts = zip(*(split_rows(micro[name]) for name in ("prompts", "responses")), strict=True)
    return [torch.cat(part).numpy() for part in parts]
