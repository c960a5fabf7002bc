"""Trains a Keras program that knows nothing of ringreduce on all ranks of a job."""
