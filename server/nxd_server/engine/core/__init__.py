"""The scheduler, the slots and the steps."""
