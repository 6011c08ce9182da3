"""How a whole run goes: steps of work, interruptions, checkpoints, repairs; in closed form and drawn."""
