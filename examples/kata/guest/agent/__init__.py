"""The guest agent."""
