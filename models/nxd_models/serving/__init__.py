"""Serving code shared by all families: tasks, the generation step, the sampler, adapter slots."""
