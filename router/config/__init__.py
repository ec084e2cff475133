"""The fleet file: its settings, what they must be, what an edit changes, and the taking over of it."""
