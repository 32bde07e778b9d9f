"""The guest image, made of the distribution's own packages, and the agent inside it."""
