"""Tools of the repository itself: set-up of the environment. Standard library only."""
