"""`forage model check`: what a model's chat template, tokenizer and rows do, and what Forage does about it."""
