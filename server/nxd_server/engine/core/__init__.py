"""What runs next and how one step runs: scheduler, slots, steps."""
