"""The rollout service's end of the streams: prompts are claimed within a limit, groups are written."""
