"""Loading of published policies: checks, staging beside the served one, LoRA adapters."""
