"""Ways to spread one job over the ranks: sequence parallel, tiled data parallel, distributed decode."""
