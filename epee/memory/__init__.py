"""The memory that a rank lends to others: layouts, cpu regions, signals, slots. Independent of MoE."""
