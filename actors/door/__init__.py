"""An OpenAI-compatible door: agent programs that know nothing of Afterplay talk to the policy, and their calls become
trajectories."""
