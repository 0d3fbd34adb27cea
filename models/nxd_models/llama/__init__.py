"""Llama, Mistral, Qwen2 and Qwen3: one decoder."""
