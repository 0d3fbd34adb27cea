"""What serves a model, whatever its family: tasks, the step of generation, the sampler, slots for adapters."""
