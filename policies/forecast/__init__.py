"""What will be asked for, how much of it a backend can take within its promises, and who can be spared meanwhile."""
