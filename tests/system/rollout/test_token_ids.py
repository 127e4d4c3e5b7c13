"""Trainer and rollout service make the same token ids of the same texts and chats, each with its own libraries."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from token_ids import list_ids

TEXTS = [
    "",
    " ",
    "\n",
    "What is the capital of Mongolia?",
    "<think>It is</think>\n<search>capital of Mongolia</search>\n<answer> Ulaanbaatar </answer>",
    "</search><answer><search</answer>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|endoftext|>",
    "<|im_start|> <|im_end|>x<|im_end|>\n\n<|endoftext|><|endoftext|>",
    "def f(x: int) -> str:\n\tif x >= 10_000:\r\n        return f'{x!r:>12}'  # tabs\tand\t\tspaces\n\n\n",
    'for (int i = 0; i < n; ++i) { a[i] += 0x1F & ~b[i]; } // "quoted \\"" <T&&>',
    " " * 700,
    "x" + " " * 33 + "y" + "\t" * 17 + "z" + "\n" * 40,
    "\u00a0\u2003\u3000\u200b\ufeff\u2028 spaces of other kinds \u0085",
    "ﬁancée É E\u0301 Å A\u030a ﷺ ① ２０２６ ℌ",  # composed, decomposed and compatibility forms
    "Улаанбаатар 乌兰巴托 ウランバートル 울란바토르 أولان باتور אולן בטור อูลานบาตอร์ उलानबटार",
    "👩‍👩‍👧‍👦🏳️‍🌈🇲🇳 e\u0301\u0327\u0323 \U0001f469\U0001f3fd\u200d\U0001f692 \u202eright to left\u202c",
    "it's we'll THEY'RE I'd don't 'tis O’Brien",
    "3.14159 1,000,000 12345678901234567890 1e-5 ½ ²",
    "\x00\x01\x1b[31mred\x1b[0m\x7f \ufffd \ud7ff \ue000 \U0010fffd",
    "a" * 3000,
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\path\\to\\file.txt",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": 'Finds passages; "quotes", <tags> & ünïcödé.',
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "capital of Монгол"}}}
SYSTEM = {"role": "system", "content": "  Answer.\n\n"}
TURNS = [
    {"role": "user", "content": "What is the capital of Mongolia?\n"},
    {"role": "assistant", "content": "<search>capital</search>"},
    {"role": "user", "content": "<information>Ulaanbaatar <|im_end|></information>"},
]
CHATS = [
    {"messages": TURNS[:1], "tools": None},
    {"messages": [SYSTEM, *TURNS], "tools": None},
    {"messages": [{"role": "user", "content": ""}], "tools": None},
    {"messages": [SYSTEM, *TURNS], "tools": TOOLS},
    {
        "messages": [
            TURNS[0],
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "Ulaanbaatar"},
        ],
        "tools": TOOLS,
    },
]
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'Answer.' }}

<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and tools %}{% continue %}{% endif -%}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' %}<tool_response>{{ message.content | trim }}</tool_response>
{%- else %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson(indent=2) }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template like those of models that call tools: filters, loop controls, attributes that may be missing."""


def make_corpus() -> dict[str, Any]:
    """The texts above, and 200 made of random characters and their beginnings."""
    draw = random.Random(7)
    kinds = [range(32, 127), range(0xA0, 0x600), range(0x4E00, 0x5000), range(0x1F300, 0x1F600), [9, 10, 13, 32]]
    pieces = ["<search>", "</answer>", "<|im_end|>", "  ", "\n\n", "the"]
    made = []
    for _ in range(200):
        characters = [chr(draw.choice(draw.choice(kinds))) for _ in range(draw.randrange(1, 60))]
        characters[draw.randrange(len(characters))] = draw.choice(pieces)
        made.append("".join(characters))
    return {"texts": TEXTS + made, "chats": CHATS}


def write_qwen_style(folder: Path, repository: Path) -> Path:
    """A folder of files like Qwen's: NFC, single digits, bytes; the vocabulary comes from pages of docs/"""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    words = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(file) for file in sorted((repository / "docs").rglob("*.md"))], trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}')
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 131072}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, Path]:
    """Tokenizers: this repository's, SmolLM2's where `forage model smollm2` has written it, and one like Qwen's."""
    shipped = {name: repository / "models" / name for name in ("tiny-policy", "tiny-countdown", "smollm2-135m")}
    made = write_qwen_style(tmp_path_factory.mktemp("tokenizer") / "qwen", repository)
    return {name: folder for name, folder in shipped.items() if folder.is_dir()} | {"qwen-style": made}


def test_both_services_make_the_same_ids(folders: dict[str, Path], repository: Path) -> None:
    assert {"tiny-policy", "tiny-countdown", "qwen-style"} <= folders.keys()
    corpus = make_corpus()
    command = [repository / ".venvs/trainer/bin/python", repository / "tests/support/token_ids.py", "trainer"]
    ended = subprocess.run([*command, *folders.values()], input=json.dumps(corpus), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for (name, folder), theirs in zip(folders.items(), json.loads(ended.stdout.splitlines()[-1]), strict=True):
        ours = json.loads(json.dumps(list_ids("rollout", folder, corpus)))
        assert len(ours["texts"]) == len(corpus["texts"])
        assert ours.keys() == theirs.keys()
        for kind, values in ours.items():
            for number, (own, other) in enumerate(zip(values, theirs[kind], strict=True)):
                assert own == other, f"{name}: {kind}, number {number}"


def test_the_template_of_the_test_calls_tools(folders: dict[str, Path]) -> None:
    """The chats with tools are no others without them."""
    made = list_ids("rollout", folders["qwen-style"], {"texts": [], "chats": CHATS})["chats"]
    assert len({tuple(ids) for ids in made}) == len(made)
