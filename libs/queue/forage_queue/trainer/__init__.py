"""The trainer's end of the streams: prompts are issued, groups arrive, each is trained on once."""
