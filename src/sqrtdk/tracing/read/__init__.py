"""Reading: from a softmax, or a kernel's arguments, back to the projections; one reader a kind of attention."""
