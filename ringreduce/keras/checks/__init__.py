"""What is refused or warned of before and during training, and what ranks compare."""
