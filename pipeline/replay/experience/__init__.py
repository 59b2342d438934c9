"""What of the past is kept and played into the batches again (REPLAY.md 1, 2 and 5). Pure: no clock, no I/O."""
