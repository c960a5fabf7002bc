"""The collectives on flat arrays; one file for each way of doing them."""
