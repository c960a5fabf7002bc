"""The loop of `rr.fit`: its epochs, its calls of TensorFlow, and who looks at batches."""
