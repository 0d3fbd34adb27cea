"""Helpers for all layers above: processes, files, locks, this machine. None knows about models."""
