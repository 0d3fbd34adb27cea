"""Text processing: tokenizer, incremental detokenizer with stop strings, chat templates. Does not use transformers."""
