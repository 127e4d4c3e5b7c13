"""verl's FSDP engines: actor, reference and critic workers, split over all processes."""
