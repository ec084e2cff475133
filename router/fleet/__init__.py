"""The backends as they are now: their books, their health, and what is believed of them."""
