"""What the caller and its ranks share: the memory of the tensors, and the records of their socket."""
