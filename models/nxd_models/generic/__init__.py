"""The family of last resort: transformers' own module, for any model type with a tensor-parallel plan."""
