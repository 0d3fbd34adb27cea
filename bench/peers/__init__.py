"""The measured programs: this project and its peers, each in its own process and environment."""
