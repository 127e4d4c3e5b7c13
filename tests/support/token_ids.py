"""Token ids of texts and chats, as one service makes them; the test of another service runs this file.

usage: <python of the environment> token_ids.py rollout|trainer FOLDER… < CORPUS
    CORPUS  {"texts": […], "chats": [{"messages": […], "tools": […] or null}, …]}
Prints a list: what `list_ids` returns for each folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def list_ids(service: str, folder: Path, corpus: dict[str, Any]) -> dict[str, Any]:
    """What a service computes from the corpus, with the tokenizer loaded as it loads it, in words of JSON."""
    chats = [[{name: m[name] for name in ("role", "content")} for m in chat["messages"]] for chat in corpus["chats"]]
    if service == "rollout":
        from vllm.tokenizers import get_tokenizer

        from forage_rollout.engine.chat import render_chat
        from forage_rollout.loop.tokens import FileTokenizer, escape_message

        tokenizer, codec = get_tokenizer(str(folder)), FileTokenizer(folder)
        prompts = [
            render_chat(tokenizer, [{name: escape_message(codec, text) for name, text in m.items()} for m in chat])
            for chat in chats
        ]
        lengths = [len(prompt.token_ids) for prompt in prompts]
    else:
        from forage_runtime.settings import Settings
        from forage_trainer.chats.chat_tokenizer import ChatTokenizer

        own = ChatTokenizer(Settings(model={"path": folder}))
        tokenizer = own._tokenizer
        lengths = own.count_prompt_tokens(chats)
    encoded = [tokenizer.encode(text) for text in corpus["texts"]]
    return {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.all_special_ids],
        "texts": encoded,
        "plain": [tokenizer.encode(text, add_special_tokens=False) for text in corpus["texts"]],
        "decoded": [[tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)] for ids in encoded],
        "chats": [
            tokenizer.apply_chat_template(
                chat["messages"], tools=chat["tools"], add_generation_prompt=opened, return_dict=False
            )
            for chat in corpus["chats"]
            for opened in (False, True)
        ],
        "lengths of prompts": lengths,
    }


if __name__ == "__main__":
    given = json.load(sys.stdin)
    answers = [list_ids(sys.argv[1], Path(folder), given) for folder in sys.argv[2:]]
    sys.stdout.write("\n" + json.dumps(answers) + "\n")
