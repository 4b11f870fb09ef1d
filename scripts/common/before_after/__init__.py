"""Parts of compare_training.py: two training scripts, before and after an optimization."""
