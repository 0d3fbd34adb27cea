"""T5: T5, T5 v1.1, FLAN-T5."""
