"""The ranks as their caller sees them: processes, the channel and memory to them, what became of them."""
