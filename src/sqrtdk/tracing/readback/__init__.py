"""The spine of an attention: from its softmax, or a kernel's arguments, back to the product and the projections."""
