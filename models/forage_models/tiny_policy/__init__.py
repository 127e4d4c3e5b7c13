"""The code that makes models/tiny-policy and models/tiny-countdown: Qwen2 models of a million parameters."""
