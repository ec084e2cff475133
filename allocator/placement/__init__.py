"""Where a gang goes: which devices (`topology`), and which of the card types that its job allows (`cards`)."""
