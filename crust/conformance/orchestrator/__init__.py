"""The CO that the cases speak through: calls with their transcript, usual sequences, undoing, what the host shows."""
