"""State at run time: where each slot lies, what each view holds, whose caches they are."""
