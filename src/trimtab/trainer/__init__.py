"""The trainer: recipes, the model, sampling, several processes, the memory estimate, and the run itself."""
