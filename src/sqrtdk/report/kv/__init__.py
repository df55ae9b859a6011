"""Shows the forecast of a quantised cache, which is part of a check."""
