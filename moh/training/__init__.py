"""One loop for all tasks: schedule, state, checkpoints."""
