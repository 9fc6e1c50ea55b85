"""Published checkpoints: their parameter names to this project's and back, a module a family."""
