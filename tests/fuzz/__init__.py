"""Fuzzing of every parser of what others have written: ``make fuzz``, and the corpus in the tests."""
