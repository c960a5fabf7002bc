"""The threads of a communicator: one runs its work in order, one watches."""
