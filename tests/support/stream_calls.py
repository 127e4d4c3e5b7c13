"""A call of every function of the streams: keys below the prefix of a run, and arguments."""

from __future__ import annotations

GROUP, ENTRY = "forage", "1-0"
CALLS = {
    "acknowledge": (
        ["epoch", "replies", "ledger", "issued", "stored:1", "issued:1"],
        ["1", GROUP, "1", "entry", "1", "1", ENTRY],
    ),
    "acknowledge_policy": (["replicas", "alive", "served"], ["engine", "policy"]),
    "acquire_epoch": (["epoch", "policy"], ["1"]),
    "close_stream": (["epoch", "replies", "issued:1", "stored:1"], ["1"]),
    "create_group": (["validation-1", "epoch", "issued:1"], [GROUP, "1"]),
    "declare_environments": (["environments"], ["{}", "15"]),
    "discard": (["epoch", "replies", "stored:1"], ["1", GROUP, ENTRY]),
    "find_absent": (["prompts", "issued:1"], []),
    "finish": (["prompts", "replies", "trajectories", "stored:1", "finished"], [GROUP, ENTRY, "group", "1-2", "call"]),
    "issue": (["epoch", "prompts", "issued:1", "issued"], ["1", "5/0", "uid", "prompt", "1"]),
    "list_stored": (["epoch", "replies", "stored:1"], ["1"]),
    "offer_payloads": (["epoch", "payloads"], ["1", "mark"]),
    "prune": (["epoch", "replicas", "alive", "prompts", "replies"], ["1", GROUP, "60", "0"]),
    "publish": (["epoch", "policy", "announced", "served"], ["1", "policy"]),
    "read_replicas": (["replicas", "alive"], ["60"]),
    "reclaim": (["epoch", "replies"], ["1", GROUP, "trainer", ENTRY]),
    "reject": (["replies", "rejected", "stored:1", "epoch"], [GROUP, ENTRY, "content", "9", "1"]),
    "replace_shift": (["shift", "announced"], ["shift", "another", "1"]),
    "set_shift": (["epoch", "shift", "announced"], ["1", "another"]),
    "touch": (["writes"], []),
}
