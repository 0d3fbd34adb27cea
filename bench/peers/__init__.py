"""Who is measured: this project and its peers, each in a process and an environment of its own."""
