"""Configuration files of Hugging Face model directories."""
