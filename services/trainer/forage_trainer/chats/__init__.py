"""The policy's tokenizer and chat template, as the trainer needs them."""
