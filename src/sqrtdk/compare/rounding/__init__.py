"""How far two correct computations may differ, by the rounding of their dtypes, derived and measured."""
