"""The ranks from the caller's side: their processes, the channel and the shared memory, their failures."""
