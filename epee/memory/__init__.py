"""What a rank lends to others: layouts, host regions, signals, slots. Nothing here knows about MoE."""
