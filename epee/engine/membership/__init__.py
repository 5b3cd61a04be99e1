"""How a group goes on when its view changes: losses, returns, growth."""
