"""Layers that ranks divide among them, and what tells their pieces from whole variables."""
