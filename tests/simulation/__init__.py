"""A whole run in one simulated machine, the weather that it suffers, the history that judges it, and its rules."""
