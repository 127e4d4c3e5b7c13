"""Sessions: trajectories whose agent is outside the service and talks to the policy with an OpenAI client."""
