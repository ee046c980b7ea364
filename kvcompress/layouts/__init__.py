"""How kept tokens lie in memory."""
