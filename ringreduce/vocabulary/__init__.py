"""Definitions that everything else uses: errors, types, times, settings."""
