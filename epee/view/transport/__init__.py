"""How agents find and reach each other."""
