"""`DistributedOptimizer`: which optimizers it takes, its first step, its state, what it updates."""
