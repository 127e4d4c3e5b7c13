"""Makes the tiny policy of `models/tiny-policy`: a Qwen2 of a million parameters that can search and copy."""
