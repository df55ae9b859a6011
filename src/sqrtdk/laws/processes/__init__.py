"""A model on several processes beside the same model on one: what each has of a run, and where and why they part."""
