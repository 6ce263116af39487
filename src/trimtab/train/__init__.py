"""The trainer: recipes, the loop, checkpoints."""
