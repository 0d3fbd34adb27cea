"""The artifact on disk: manifest, reader, writer, rank weights. Knows no backend and starts no process."""
