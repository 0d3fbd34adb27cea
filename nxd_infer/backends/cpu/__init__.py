"""The backends of a plain CPU: inductor (compiled) and eager (node by node)."""
