"""Text in and out: tokenizer, incremental detokenizer with stop strings, chat templates. Needs no transformers."""
