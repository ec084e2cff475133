"""A small training job that really trains, saves when it is asked to go, and resumes to the same loss curve."""
