"""BERT, MiniLM and RoBERTa: encoders for embeddings and classification."""
