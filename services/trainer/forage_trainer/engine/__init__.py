"""verl's FSDP engines: actor, reference and critic workers on every process."""
