"""Helpers of every floor above: processes, files, locks, this machine. None knows what a model is."""
