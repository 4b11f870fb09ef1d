"""Programs that keep this repository true: checks, recordings and generated tables."""
