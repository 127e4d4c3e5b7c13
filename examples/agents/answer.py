"""An agent that asks the policy until it answers, with OpenAI's own client: `forage worker examples/agents/answer.py`.

Its reward is 1 for an accepted answer. Where it returned None, the reward service would give the reward.
"""

import re

from openai import AsyncOpenAI

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ASK_AGAIN = "Write your answer between <answer> and </answer>."


async def run(task, client):
    """Return the reward of one session."""
    policy = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    messages = [dict(message) for message in task.messages]
    for _ in range(3):
        reply = await policy.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content
        if found := ANSWER.search(text):
            return float(found[1].strip().lower() in [target.lower() for target in task.targets])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": ASK_AGAIN}]
    return 0.0
