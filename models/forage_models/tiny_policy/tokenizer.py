"""The tiny policy's tokenizer: byte-level BPE over names, with the loop's fixed texts as single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from forage_runtime.text.search_prompt import PROMPT_PREFIX

VOCABULARY = 1024
"""All tokens: 3 special, the added ones below, 256 bytes, and BPE merges for the rest."""
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))
SPACED_TAGS = (" </think>", " <search>", " </search>", " <answer>", " </answer>")
"""Tags with the space that usually precedes them, so that the space costs no token of its own."""
FEEDBACK = (
    "My previous action is invalid. ",
    "If I want to search, I should put the query between <search> and </search>. ",
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. ",
    "Let me try again.",
)
"""Text of the loop after an invalid action, by sentence (a newline comes before and after)."""
FRAMES = ("\n\n<information>", "</information>\n\n", "user\n", "assistant\n")
"""Texts that surround an observation and open a message."""
DOCUMENT_HEADS = tuple(f'Doc {n}(Title: "' for n in (1, 2, 3))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def split_instruction() -> list[str]:
    """Split the instruction into sentences that keep their trailing space; the last is "Question:"."""
    return [part for part in re.split(r"(?<=\. )", PROMPT_PREFIX.removesuffix(" ")) if part]


def list_added_tokens() -> list[str]:
    """List the texts that are added as single tokens (not special: decoding keeps them)."""
    return [*TAGS, *SPACED_TAGS, *split_instruction(), *FEEDBACK, *FRAMES, *DOCUMENT_HEADS]


def train_tokenizer(texts: Iterable[str], added: Sequence[str], vocabulary: int) -> Qwen2Tokenizer:
    """Learn the merges from `texts` (an iterable of lines) and put them into Qwen2's own tokenizer.

    Args:
        added: texts that become single tokens.
        vocabulary: number of tokens, with the special and the added ones.

    transformers loads the tokenizer of any Qwen2 model as this class, whatever the files say, so no other
    class would load as it was trained. Any string in Unicode's NFC form encodes and decodes back exactly.
    """
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    specials = [PAD, TURN_START, TURN_END]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(added),
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer=trainer)
    learnt = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(merge) for merge in learnt["merges"]],
        unk_token=None,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer
