"""Pure functions over text: tags, observations, answers, prompts."""
