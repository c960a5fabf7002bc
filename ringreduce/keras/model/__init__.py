"""A model's training step: built for, weighted, tried, and what it changes besides weights."""
