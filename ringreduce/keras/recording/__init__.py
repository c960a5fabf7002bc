"""What steps are like for ``ringreduce verify``: their gradients, and whole loops."""
