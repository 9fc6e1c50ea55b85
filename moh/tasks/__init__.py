"""Tasks: from a batch to a loss, with the parameter groups and the evaluators of each family."""
