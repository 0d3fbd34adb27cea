"""The ranks from the caller's side: start, call, watch and end them; why one has ended."""
