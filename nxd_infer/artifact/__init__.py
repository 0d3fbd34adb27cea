"""What lies on disk: manifest, reader, writer, the weights of a rank. Knows no backend and starts no process."""
