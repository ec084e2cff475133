"""How to choose among priced candidates; one picker a file. Pickers do not know what a price is made of."""
