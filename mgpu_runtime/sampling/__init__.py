"""Sampling: sizes, positions, noise, schedules, guidance, steppers and the loop; knows models by `predict` only."""
