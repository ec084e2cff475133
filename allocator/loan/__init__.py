"""A loan: devices of an inference pool in the hands of a training pool, with the right to call them back."""
