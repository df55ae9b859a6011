"""Why two implementations of one model differ: calls aligned, compared stage by stage, causes proven."""
