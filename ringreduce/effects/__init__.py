"""The C library, and what is recorded and written to files."""
