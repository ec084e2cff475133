"""`headrace up`: engines, fleet file and gateway in one command, and the demo of a loan."""
