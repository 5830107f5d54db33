"""Analysis of functional graphs: slot movement, slot-local work, order, host values."""
