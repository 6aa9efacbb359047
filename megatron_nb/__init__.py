"""Post-training of small language models: SFT, reward models, RL, search agents. See README.md."""
