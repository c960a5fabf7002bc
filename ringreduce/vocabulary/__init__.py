"""Words that everything else uses: errors, types, settings."""
