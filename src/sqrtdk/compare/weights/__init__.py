"""Which weight of A is which weight of B: paired by their numbers, whatever their names and layouts."""
