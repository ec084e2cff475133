"""What a request costs on a backend, in money; one price a file. Prices add, for they have one unit."""
