"""Pure transition functions of the bucket protocol (system.md §4): no clock, no store, no randomness of their own.

The trainer, the committer and the model check run the same functions.
"""
