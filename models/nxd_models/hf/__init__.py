"""Hugging Face model directories: configuration files, and weights that are read by slices."""
