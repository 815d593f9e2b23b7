"""Settings of rl_games and RSL-RL as Canter's, with a report about every key."""
